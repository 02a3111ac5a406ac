#!/usr/bin/python
"""What the ports of a machine are cabled to, found without any address."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_cables
short_description: Which machine and port each port of this one reaches
description:
  - Says its name in an Ethernet broadcast on every port and listens for others. To be run on all machines at once,
    with as many forks as there are machines. Needs root.
author: tfglm
options:
  cluster: {description: Others with another name are not heard., type: str, required: true}
  machine: {description: Name of this machine., type: str, required: true}
  netdevs: {description: Ports to try., type: list, elements: str, required: true}
  seconds: {description: How long., type: float, default: 6}
  raise_ports: {description: Switch on ports that are off; else they hear nobody., type: bool, default: false}
"""
EXAMPLES = """
- name: Listen on the cables
  tfglm_cables:
    cluster: sparks
    machine: "{{ inventory_hostname }}"
    netdevs: [enp1s0f0np0, enp1s0f1np1]
"""
RETURN = """
heard: {description: "Entries {port, machine, peer_port}.", returned: always, type: list}
raised: {description: Ports that were off., returned: always, type: list}
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.cables import listen, raise_ports


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "cluster": {"type": "str", "required": True},
            "machine": {"type": "str", "required": True},
            "netdevs": {"type": "list", "elements": "str", "required": True},
            "seconds": {"type": "float", "default": 6},
            "raise_ports": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    given = module.params
    try:
        raised = raise_ports(given["netdevs"]) if given["raise_ports"] and not module.check_mode else []
        heard = listen(given["cluster"], given["machine"], given["netdevs"], given["seconds"])
    except OSError as error:
        module.fail_json(msg=f"E_FABRIC: ports {', '.join(given['netdevs'])} cannot be listened on: {error}")
    module.exit_json(changed=bool(raised), raised=raised, heard=[asdict(entry) for entry in heard])


if __name__ == "__main__":
    main()
