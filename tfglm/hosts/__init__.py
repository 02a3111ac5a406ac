"""What a machine of the cluster is like: its ports, its facts, its files; and what is to be said about that.

Ansible carries the modules that read a machine (fabric, cables, facts, snapshot, content, serving) to machines on which
nothing is installed yet: standard library only, and no import of another module. cabling and preflight judge what was
read, where Ansible runs.
"""
