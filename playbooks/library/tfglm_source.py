#!/usr/bin/python
"""The project's own files as one archive, named after their content. Runs where Ansible does."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_source
short_description: Pack what is installed on machines
description: Writes an archive whose bytes depend on the files' contents alone, if it is not there yet.
author: tfglm
options:
  root: {description: The project's folder., type: path, required: true}
  folder: {description: Where the archive goes., type: path, required: true}
  more: {description: Text that belongs to the content as well., type: str, default: ""}
"""
EXAMPLES = """
- name: Pack tfglm
  tfglm_source:
    root: "{{ playbook_dir }}/.."
    folder: ~/.cache/tfglm
  delegate_to: localhost
"""
RETURN = """
hash: {description: 12 hex digits of the content., returned: always, type: str}
archive: {description: Path of the archive., returned: always, type: str}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.content import content_hash, pack, source_files


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "required": True},
            "folder": {"type": "path", "required": True},
            "more": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["root"]).resolve()
    files = source_files(root)
    if not files:
        module.fail_json(msg=f"E_CONFIG: {root} holds no sources of tfglm")
    archive = Path(module.params["folder"]) / f"tfglm-{content_hash(root, files)}.tar.gz"
    # A cache of this machine: writing it changes nothing that matters, so that a plan can show the rest.
    if not archive.exists():
        pack(root, files, archive)
    module.exit_json(changed=False, hash=content_hash(root, files, module.params["more"]), archive=str(archive))


if __name__ == "__main__":
    main()
