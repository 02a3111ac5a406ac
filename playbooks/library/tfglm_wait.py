#!/usr/bin/python
"""Wait until a cluster serves, or it is known that it will not."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_wait
short_description: Wait for the API of a cluster
description: Asks /health, and reads why ranks are not there from their own service. To be run on rank 0's machine.
author: tfglm
options:
  url: {description: Address of /health., type: str, required: true}
  rank: {description: Rank of this machine., type: int, default: 0}
  seconds: {description: How long., type: float, required: true}
  peer_seconds: {description: How long another rank may be silent., type: float, default: 180}
"""
EXAMPLES = """
- name: Wait
  tfglm_wait:
    url: http://127.0.0.1:8888/health
    seconds: 2400
"""
RETURN = """
waited: {description: Seconds., returned: success, type: float}
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.serving import wait


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "url": {"type": "str", "required": True},
            "rank": {"type": "int", "default": 0},
            "seconds": {"type": "float", "required": True},
            "peer_seconds": {"type": "float", "default": 180},
        },
        supports_check_mode=True,
    )
    began = time.monotonic()
    given = module.params
    problem = wait(given["rank"], given["url"], given["seconds"], given["peer_seconds"])
    waited = round(time.monotonic() - began, 1)
    if problem:
        module.fail_json(msg=problem, waited=waited)
    module.exit_json(changed=False, waited=waited)


if __name__ == "__main__":
    main()
