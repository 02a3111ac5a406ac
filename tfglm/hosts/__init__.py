"""What a machine of the cluster is like: its ports, its facts, its files. Standard library only and no import of one
another, because Ansible carries these modules to machines on which nothing is installed yet."""
