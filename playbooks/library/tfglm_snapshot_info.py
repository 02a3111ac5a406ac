#!/usr/bin/python
"""Manifest, completeness and integrity of a checkpoint folder."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_snapshot_info
short_description: What a checkpoint folder holds
description: Reads names, sizes and the first block of every file, links followed. Changes nothing but `remembered`.
author: tfglm
options:
  path: {description: Checkpoint folder., type: path, required: true}
  root: {description: Exported folder that all contents must lie in., type: path}
  siblings: {description: The Hub's list of the revision's files; gives missing_bytes., type: list, elements: dict}
  hashes: {description: Compare contents with the hashes that their blobs are named after., type: bool, default: false}
  remembered: {description: File that keeps which contents were found right., type: path}
"""
EXAMPLES = """
- name: Read the checkpoint
  tfglm_snapshot_info:
    path: /srv/models/tiny
"""
RETURN = """
present: {description: The folder is there., returned: always, type: bool}
files: {description: "Entries {name, size, head}.", returned: always, type: list}
digest: {description: 16 hex digits over the files., returned: always, type: str}
missing: {description: Files that a checkpoint must have and this one lacks., returned: always, type: list}
outside: {description: Files whose content lies outside of root., returned: always, type: list}
corrupt: {description: Files whose content is not what it should be., returned: always, type: list}
missing_bytes: {description: Bytes that a download would fetch., returned: always, type: int}
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.snapshot import (
    as_json,
    bytes_to_fetch,
    corrupt,
    digest,
    manifest,
    missing_files,
    outside,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "root": {"type": "path"},
            "siblings": {"type": "list", "elements": "dict"},
            "hashes": {"type": "bool", "default": False},
            "remembered": {"type": "path"},
        },
        supports_check_mode=True,
    )
    given = module.params
    folder = Path(given["path"])
    try:
        files = manifest(folder)
        remembered = Path(given["remembered"]) if given["remembered"] and not module.check_mode else None
        module.exit_json(
            changed=False,
            present=folder.is_dir(),
            files=as_json(files),
            digest=digest(files),
            missing=missing_files(folder),
            outside=outside(folder, Path(given["root"])) if given["root"] else [],
            corrupt=corrupt(folder, remembered)[0] if given["hashes"] else [],
            missing_bytes=bytes_to_fetch(folder.parent.parent, given["siblings"] or []),
        )
    except (OSError, ValueError, KeyError) as error:
        module.fail_json(msg=f"E_CHECKPOINT: {folder} cannot be read: {error}")


if __name__ == "__main__":
    main()
