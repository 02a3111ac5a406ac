"""The docker runtime with a real docker, where one answers: labels, limits, one end for all, nobody else's containers.

The image is an empty tree; its programs are this machine's, mounted. Without a GPU, as Docker.gpus "none" says.
"""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from supervised import HERE, ROOT, Supervised

IMAGE = f"tfglm-test-{os.getpid()}:1"


def docker(*words: str, **how: bytes) -> str:
    done = subprocess.run(["docker", *words], capture_output=True, timeout=60, check=True, input=how.get("given"))
    return done.stdout.decode().strip()


def answers() -> bool:
    if not shutil.which("docker"):
        return False
    try:
        docker("info")
    except (subprocess.SubprocessError, OSError):
        return False
    return True


pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not answers(), reason="no docker answers here"),
]


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for folder in ("usr", "tmp", "etc", "proc", "sys", "dev", "notes"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o777
            tar.addfile(entry)
        for link in ("bin", "lib", "lib64"):
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{link}"
            tar.addfile(entry)
    docker("import", "--change", "LABEL tfglm.hash=1234", "-", IMAGE, given=data.getvalue())
    yield IMAGE
    docker("image", "rm", "--force", IMAGE)


@pytest.fixture
def two(image: str, tmp_path: Path) -> Iterator[Supervised]:
    notes = tmp_path / "notes"
    notes.mkdir(mode=0o777)
    # Where this Python and its packages lie, and the stand-in for an engine.
    places = {"/usr", str(Path(sys.base_prefix)), sys.prefix, str(ROOT), str(HERE)}
    volumes = [f"{place}:{place}:ro" for place in sorted(places)] + [f"{notes}:/notes"]
    facts = {"image": image, "image_hash": "1234", "gpus": "none", "volumes": volumes, "cache": str(tmp_path / "cache")}
    (tmp_path / "cache").mkdir()
    with Supervised(tmp_path, count=2, runtime="docker", docker=facts, environment={"FAKE_NOTES": "/notes"}) as cluster:
        yield cluster
        subprocess.run(["docker", "rm", "--force", *containers(cluster)], capture_output=True, timeout=60, check=False)


def containers(cluster: Supervised, *filters: str) -> list[str]:
    labels = [f"--filter=label=tfglm.cluster={cluster.cluster['name']}", *(f"--filter={text}" for text in filters)]
    return docker("ps", "--all", "--quiet", *labels).split()


def serve(cluster: Supervised) -> None:
    cluster.start()
    cluster.until_serving(1, 120)


def test_an_engine_is_one_labelled_container_that_ends_in_order(two: Supervised) -> None:
    serve(two)
    for rank in (0, 1):
        (found,) = containers(two, f"label=tfglm.rank={rank}")
        (facts,) = json.loads(docker("inspect", found))
        assert facts["Config"]["Labels"]["tfglm.generation"] == "1"
        assert facts["Config"]["User"] == f"{os.getuid()}:{os.getgid()}"
        host = facts["HostConfig"]
        assert (host["NetworkMode"], host["IpcMode"], host["Privileged"]) == ("host", "host", False)
        assert f"{two.checkpoint}:{two.checkpoint}:ro" in host["Binds"]
    two.signal(1, signal.SIGTERM)
    assert two.ended(1) == 0
    two.until(lambda: not containers(two), 20, "no container left")
    two.signal(0, signal.SIGTERM)
    assert two.ended(0) == 0


def test_a_container_that_is_killed_ends_all_and_all_start_again(two: Supervised) -> None:
    serve(two)
    before = set(containers(two))
    docker("kill", *containers(two, "label=tfglm.rank=1"))
    two.until_serving(2, 120)
    assert len(containers(two)) == 2
    assert not before & set(containers(two))


def test_what_a_killed_supervisor_leaves_is_reaped_and_nobody_elses(two: Supervised) -> None:
    serve(two)
    volume = ["--volume", "/usr:/usr:ro", "--label", f"tfglm.cluster=not-{two.cluster['name']}"]
    other = docker("run", "--detach", *volume, "--label", "tfglm.rank=1", IMAGE, "/usr/bin/sleep", "600")
    try:
        two.signal(1, signal.SIGKILL)
        two.ended(1)
        reaping = two.run(1, "rank", "reap", "--rank", "1", "--config", str(two.config(1)))
        assert reaping.wait(60) == 0
        assert containers(two, "label=tfglm.rank=1") == []
        assert docker("inspect", "--format", "{{.State.Running}}", other) == "true"
        two.start(1)
        two.until_serving(2, 120)
    finally:
        docker("rm", "--force", other)


def test_an_engine_that_does_not_hear_is_killed_in_its_container(two: Supervised) -> None:
    two.behave(1, deaf=True)
    serve(two)
    two.signal(0, signal.SIGTERM)
    assert two.ended(0) == 0
    two.until(lambda: not containers(two), 30, "no container left")


def test_why_docker_does_not_start_a_container_is_said(two: Supervised) -> None:
    for rank in (0, 1):
        two.write(rank, command=["/no/such/program"])
    two.start(0)
    assert two.ended(0, 60) == 67
    said = next(line for line in two.log(0).splitlines() if "E_WORKER" in line)
    assert "no memory plan can be made: docker: Error response from daemon" in said
    assert "/no/such/program" in said


def test_an_image_of_another_content_is_not_started(two: Supervised) -> None:
    for rank in (0, 1):
        two.write(rank, docker={**two.cluster["docker"], "image_hash": "5678"})
    two.start(0)
    assert two.ended(0, 60) == 67
    assert f"image {IMAGE} has content hash 1234; cluster.json says 5678" in two.log(0)
