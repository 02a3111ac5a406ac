#!/usr/bin/python
"""An image by what it contains."""

from __future__ import annotations

DOCUMENTATION = """
module: tfglm_image_info
short_description: Content identity and labels of a docker image
description: Asks docker for layers and configuration, whose hash is the same for one image on every machine.
author: tfglm
options:
  image: {description: Tag or digest., type: str, required: true}
"""
EXAMPLES = """
- name: Read the image
  tfglm_image_info:
    image: tfglm:0123456789ab
"""
RETURN = """
present: {description: The image is there., returned: always, type: bool}
identity: {description: 12 hex digits of its content., returned: always, type: str}
labels: {description: Its labels., returned: always, type: dict}
digests: {description: Digests that registries know it by., returned: always, type: list}
"""

import json

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.tfglm_hosts.content import image_identity


def main() -> None:
    module = AnsibleModule(argument_spec={"image": {"type": "str", "required": True}}, supports_check_mode=True)
    docker = module.get_bin_path("docker")
    if docker is None:
        module.exit_json(changed=False, present=False, identity="", labels={}, digests=[])
    rc, out, err = module.run_command([docker, "image", "inspect", module.params["image"]])
    if rc and "No such image" not in err:
        module.fail_json(msg=f"E_WORKER: docker cannot be asked for {module.params['image']}: {err.strip()}")
    found = json.loads(out or "[]")
    image = found[0] if found else {}
    module.exit_json(
        changed=False,
        present=bool(found),
        identity=image_identity(image) if found else "",
        labels=(image.get("Config") or {}).get("Labels") or {},
        digests=image.get("RepoDigests") or [],
    )


if __name__ == "__main__":
    main()
