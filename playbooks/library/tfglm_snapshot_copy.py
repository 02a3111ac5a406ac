#!/usr/bin/python
"""A checkpoint folder copied from where the head's is mounted."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_snapshot_copy
short_description: Copy what differs of a checkpoint folder
description: Copies contents instead of links, goes on where it was stopped, and refuses a disk that is too small.
author: tfglm
options:
  source: {description: Folder to copy from., type: path, required: true}
  target: {description: Folder to copy to., type: path, required: true}
"""
EXAMPLES = """
- name: Copy the checkpoint
  tfglm_snapshot_copy:
    source: /run/tfglm/head/tiny
    target: /srv/models/tiny
"""
RETURN = """
copied: {description: Bytes that were, or in check mode would be, copied., returned: always, type: int}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.snapshot import copy_from


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "target": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    source, target = Path(module.params["source"]), Path(module.params["target"])
    if not source.is_dir():
        module.fail_json(msg=f"E_CHECKPOINT: {source} is not there: the head's export is not mounted, or lacks it")
    try:
        copied = copy_from(source, target, write=not module.check_mode)
    except OSError as error:
        module.fail_json(msg=f"E_DISK: {target} cannot be written: {error}")
    module.exit_json(changed=copied > 0, copied=copied)


if __name__ == "__main__":
    main()
