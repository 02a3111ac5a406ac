#!/usr/bin/python
"""Facts of a machine: what decides whether it can be a rank, its memory, its ports."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_host_info
short_description: What a machine has for a rank of tfglm
description: Reads architecture, GPU, docker, disks, ports, memory and fabric. Changes nothing.
author: tfglm
options:
  sysroot: {description: Root of the tree that is read., type: path, default: /}
  folders: {description: Folders whose disks are asked for free space., type: list, elements: path, default: []}
  ports: {description: Network ports that should be free., type: list, elements: int, default: []}
  netdevs: {description: Ports of the cables; empty finds those with an RDMA device., type: list, elements: str,
            default: []}
"""
EXAMPLES = """
- name: Read the machine
  tfglm_host_info:
    ports: [8888]
"""
RETURN = """
host: {description: Facts as tfglm.hosts.facts.read_facts gives them., returned: always, type: dict}
memory: {description: Bytes, and budget, which is what a plan may count on., returned: always, type: dict}
fabric: {description: Ports in the order of cables and twins., returned: always, type: dict}
"""

from dataclasses import asdict
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.fabric import read_fabric
from ansible.module_utils.tfglm_hosts.facts import read_facts
from ansible.module_utils.tfglm_memory import read_memory


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "sysroot": {"type": "path", "default": "/"},
            "folders": {"type": "list", "elements": "path", "default": []},
            "ports": {"type": "list", "elements": "int", "default": []},
            "netdevs": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    given = module.params
    sysroot = Path(given["sysroot"])
    memory = read_memory(sysroot)
    module.exit_json(
        changed=False,
        host=read_facts(sysroot, given["folders"], given["ports"]),
        memory=asdict(memory) | {"budget": memory.budget},
        fabric=read_fabric(sysroot, given["netdevs"]).as_json(),
    )


if __name__ == "__main__":
    main()
