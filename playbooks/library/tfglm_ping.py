#!/usr/bin/python
"""Full-size packets over every rail."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_ping
short_description: Whether unsplit packets of full size pass, from a given port
description: Pings all targets at once, each from its own port. Changes nothing.
author: tfglm
options:
  targets:
    description: What to reach.
    type: list
    elements: dict
    required: true
    suboptions:
      port: {description: Netdev to send from., type: str, required: true}
      address: {description: Address to reach., type: str, required: true}
      mtu: {description: Size of the packets with their headers., type: int, required: true}
  attempts: {description: How often to try; a port that was just configured needs a moment., type: int, default: 5}
"""
EXAMPLES = """
- name: Try a rail
  tfglm_ping:
    targets: [{port: enp1s0f0np0, address: 10.122.0.2, mtu: 9000}]
"""
RETURN = """
failed_pings: {description: "Entries {port, address, mtu, said} that did not pass.", returned: always, type: list}
"""

import time
from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.cables import ping_all

PAUSE_S = 2


def main() -> None:
    target = {
        "port": {"type": "str", "required": True},
        "address": {"type": "str", "required": True},
        "mtu": {"type": "int", "required": True},
    }
    module = AnsibleModule(
        argument_spec={
            "targets": {"type": "list", "elements": "dict", "required": True, "options": target},
            "attempts": {"type": "int", "default": 5},
        },
        supports_check_mode=True,
    )
    wanted = [(t["port"], t["address"], t["mtu"]) for t in module.params["targets"]]
    lost = []
    try:
        for attempt in range(module.params["attempts"]):
            if attempt:
                time.sleep(PAUSE_S)
            lost = [ping for ping in ping_all(wanted) if not ping.passed]
            wanted = [(ping.port, ping.address, ping.mtu) for ping in lost]
            if not wanted:
                break
    except OSError as error:
        module.fail_json(msg=f"E_FABRIC: ping cannot be run: {error}")
    module.exit_json(changed=False, failed_pings=[asdict(ping) for ping in lost])


if __name__ == "__main__":
    main()
