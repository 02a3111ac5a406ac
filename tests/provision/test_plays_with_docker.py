"""The docker runtime on three machines with stand-ins for docker and a GB10's nvidia-smi: what is built, where it goes,
what a rank runs; and that machines with different images are refused."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from fake_machines import FakeMachines, needs_ansible, recap, task

pytestmark = needs_ansible

ROOT = Path(__file__).resolve().parents[2]
DIGEST = "sha256:" + "a1" * 32
DOCKER = {"tfglm_runtime": "docker", "tfglm_gpu": "gb10", "tfglm_image_free_gib": 0, "tfglm_base_digest": DIGEST}
IMAGE_ALONE = """
- name: Bring the image alone
  hosts: sparks
  gather_facts: false
  any_errors_fatal: true
  roles: [preflight, image]
  handlers:
    - name: Restart the rank
      ansible.builtin.debug: {msg: not here}
"""


@pytest.fixture(scope="module")
def docked(machines: FakeMachines) -> FakeMachines:
    """Every machine's container runtime knows the GPU."""
    for name in machines.names:
        machines.run(name, "mkdir -p /etc/cdi && echo cdiVersion: 0.6.0 > /etc/cdi/nvidia.yaml")
    (machines.project / "playbooks/image.yml").write_text(IMAGE_ALONE)
    return machines


def words(text: str) -> str:
    return " ".join(text.split())


def asked(machines: FakeMachines, name: str, verb: str) -> list[str]:
    log = machines.root(name) / "var/lib/stub-docker/log"
    return [line for line in log.read_text().splitlines() if line.startswith(f"{verb} ")] if log.exists() else []


def test_docker_without_a_way_to_the_gpu_is_refused(machines: FakeMachines) -> None:
    done = machines.play("site", **DOCKER)
    assert "E_WORKER: spark1: docker has no way to the GPU (runtimes runc; no CDI)" in words(done.stdout)


def test_site_builds_one_image_and_brings_it_over_the_export(docked: FakeMachines) -> None:
    first = docked.play("site", **DOCKER)
    assert first.returncode == 0, first.stdout[-4000:] + first.stderr[-2000:]
    base = f"nvcr.io/nvidia/pytorch:26.07-py3@{DIGEST}"
    assert asked(docked, "spark0", "pull") == [f"pull --quiet {base}"]
    (build,) = asked(docked, "spark0", "build")
    reference = re.search(r"--tag=(tfglm:([0-9a-f]{12}))", build)
    assert reference is not None
    assert f"--label=tfglm.hash={reference[2]}" in build
    assert f"--label=tfglm.base={base}" in build
    for name in ("spark1", "spark2"):
        assert asked(docked, name, "pull") == asked(docked, name, "build") == []
        (load,) = asked(docked, name, "load")
        assert load.endswith(f"/srv/models/.tfglm/tfglm-{reference[2]}.tar")
    assert list((docked.root("spark0") / "srv/models/.tfglm").iterdir()) == [], "the export keeps no image"
    for name in docked.names:
        kernels = [line for line in asked(docked, name, "run") if " kernels build " in line]
        assert len(kernels) == 1
        assert "--network=none" in kernels[0]
        assert kernels[0].endswith(f"--entrypoint=tfglm {reference[1]} kernels build --arch sm_121")
    (plan,) = [line for line in asked(docked, "spark0", "run") if " plan /srv/models/tiny --json" in line]
    assert "--memory=3g" in plan
    assert "--volume=/srv/models:/srv/models:ro" in plan
    facts = docked.document("spark0", "cluster.json")
    assert facts["runtime"] == "docker"
    assert facts["docker"] == {"image": reference[1], "image_hash": reference[2], "gpus": "cdi"} | {
        "volumes": [],
        "cache": "/var/cache/tfglm",
        "memory": "",
    }
    second = docked.play("site", **DOCKER)
    assert second.returncode == 0, second.stdout[-4000:]
    assert recap(second.stdout) == dict.fromkeys(docked.names, (0, 0)), re.findall(
        r"TASK.*\n(?:changed.*)", second.stdout
    )


def test_the_dockerfile_is_ours_on_a_pinned_base(docked: FakeMachines) -> None:
    (file,) = (docked.root("spark0") / "opt/tfglm/build").glob("*/Dockerfile")
    text = file.read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.match(r"(FROM|RUN|COPY|WORKDIR|ENV|ENTRYPOINT) ", line) for line in lines), lines
    assert [line for line in lines if line.startswith("FROM")] == [f"FROM nvcr.io/nvidia/pytorch:26.07-py3@{DIGEST}"]
    order = [text.index(part) for part in ("COPY tfglm.tar.gz", "aiohttp", "apply-series.sh patches", "--no-deps .")]
    assert order == sorted(order), "dependencies, then patches to them, then tfglm itself"
    packages = next(line for line in lines if "aiohttp" in line)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert re.findall(r'"(.*?)"', packages) == [name for name in project if not name.startswith("torch")]
    assert {path.name for path in file.parent.iterdir()} == {"Dockerfile", "tfglm.tar.gz", "apply-series.sh"}


def test_a_ranks_command_is_a_container_with_the_gpu_and_its_labels(docked: FakeMachines) -> None:
    done = docked.run("spark1", "/usr/local/bin/tfglm rank command --rank 1")
    assert done.returncode == 0, done.stderr
    for part in (
        "docker run --rm --name tfglm-sparks-1 --label=tfglm.cluster=sparks --label=tfglm.rank=1 ",
        "--device nvidia.com/gpu=all",
        "--volume /srv/models:/srv/models:ro --volume /var/cache/tfglm:/cache",
        "engine /srv/models/tiny --rank 1 --ranks 3 --leader 10.77.9.10:29561",
    ):
        assert part in done.stdout
    unit = (docked.root("spark1") / "etc/systemd/system/tfglm@.service").read_text()
    assert re.search(r"^After=.* docker\.service$", unit, re.MULTILINE)


def test_an_image_of_other_content_is_refused(docked: FakeMachines) -> None:
    (file,) = (docked.root("spark2") / "var/lib/stub-docker").glob("tfglm:*.json")
    kept = file.read_text()
    changed = json.loads(kept)
    changed["RootFS"]["Layers"][-1] = "another"
    file.write_text(json.dumps(changed))
    try:
        done = docked.play("image", **DOCKER)
    finally:
        file.write_text(kept)
    said = words(task(done.stdout, "Refuse images that are missing or differ"))
    assert re.search(r"E_WORKER: spark2 has image tfglm:\w+ as [0-9a-f]{12}, spark0 as [0-9a-f]{12}; remove it", said)
    assert "E_WORKER: spark1" not in said


def test_a_registry_brings_it_too(docked: FakeMachines) -> None:
    registry = {"tfglm_image_transfer": "registry", "tfglm_registry": "registry.example:5000"}
    done = docked.play("image", **DOCKER, **registry)
    assert done.returncode == 0, done.stdout[-3000:]
    (pushed,) = asked(docked, "spark0", "push")
    assert pushed.startswith("push --quiet registry.example:5000/tfglm:")
    for name in ("spark1", "spark2"):
        assert asked(docked, name, "pull") == [pushed.replace("push", "pull")]


def test_an_image_that_is_there_is_taken_as_it_is(docked: FakeMachines) -> None:
    missing = docked.play("image", **DOCKER, tfglm_image="mine:1")
    assert "E_WORKER: spark0 has image mine:1 as missing" in words(missing.stdout)
    for name in docked.names:
        folder = docked.root(name) / "var/lib/stub-docker"
        (ours,) = folder.glob("tfglm:*.json")
        (folder / "mine:1.json").write_text(ours.read_text())
    builds = len(asked(docked, "spark0", "build"))
    done = docked.play("image", **DOCKER, tfglm_image="mine:1")
    assert done.returncode == 0, done.stdout[-3000:]
    assert len(asked(docked, "spark0", "build")) == builds
