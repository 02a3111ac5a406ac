"""Three machines as network namespaces, a real cable between every two of them: who hears whom, and do packets pass."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = [f"tfglm-test-{os.getpid()}-{i}" for i in range(3)]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture(scope="module")
def triangle() -> Iterator[list[str]]:
    """Port p0 of each machine is cabled to port p1 of the next; every port is off, as on a new machine."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip to make network namespaces")
    try:
        ip("netns", "add", NAMES[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode().strip()}")
    try:
        try:
            for name in NAMES[1:]:
                ip("netns", "add", name)
            for a, b in zip(NAMES, NAMES[1:] + NAMES[:1], strict=True):
                ip("-n", a, "link", "add", "p0", "type", "veth", "peer", "name", "p1", "netns", b)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"namespaces cannot be cabled here: {error.stderr.decode().strip()}")
        yield NAMES
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def inside(name: str, code: str) -> str:
    """Python in one namespace, with a /sys that shows its devices."""
    wrapped = f"import json, sys; sys.path.insert(0, {str(ROOT)!r}); from tfglm.hosts.cables import *; {code}"
    command = ["ip", "netns", "exec", name, sys.executable, "-c", wrapped]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def heard_by_all(seconds: float = 3) -> list[list[list[str]]]:
    code = "print(json.dumps([[h.port, h.machine[-1], h.peer_port] for h in listen('c', {!r}, ['p0', 'p1'], {})]))"
    with ThreadPoolExecutor() as pool:
        return [json.loads(out) for out in pool.map(lambda n: inside(n, code.format(n, seconds)), NAMES)]


def test_ports_that_are_off_are_switched_on_and_then_hear_their_neighbour(triangle: list[str]) -> None:
    assert heard_by_all(0.5) == [[], [], []]
    for name in triangle:
        assert json.loads(inside(name, "print(json.dumps(raise_ports(['p0', 'p1'])))")) == ["p0", "p1"]
        assert json.loads(inside(name, "print(json.dumps(raise_ports(['p0', 'p1'])))")) == []
    assert heard_by_all() == [
        [["p0", "1", "p1"], ["p1", "2", "p0"]],
        [["p0", "2", "p1"], ["p1", "0", "p0"]],
        [["p0", "0", "p1"], ["p1", "1", "p0"]],
    ]


def test_another_cluster_on_the_same_cable_is_not_heard(triangle: list[str]) -> None:
    code = "print(len(listen({!r}, {!r}, ['p0', 'p1'], 2)))"
    with ThreadPoolExecutor() as pool:
        counts = pool.map(lambda n: inside(n, code.format(n, n)), triangle[:2])
        assert [int(count) for count in counts] == [0, 0]


@pytest.mark.skipif(shutil.which("ping") is None, reason="ping is not installed")
def test_full_size_packets_pass_only_where_both_ends_take_them(triangle: list[str]) -> None:
    a, b = triangle[:2]
    for name, port, address in ((a, "p0", "10.1.0.1/24"), (b, "p1", "10.1.0.2/24")):
        ip("-n", name, "address", "add", address, "dev", port)
        ip("-n", name, "link", "set", port, "mtu", "9000", "up")
    ping = "print(json.dumps([[p.passed, p.said] for p in ping_all([('p0', '10.1.0.2', {})], 1)]))"
    assert json.loads(inside(a, ping.format(9000))) == [[True, ""]]
    ip("-n", b, "link", "set", "p1", "mtu", "1500")
    passed, _ = json.loads(inside(a, ping.format(9000)))[0]
    assert not passed
    assert json.loads(inside(a, ping.format(1500))) == [[True, ""]]
    ip("-n", a, "link", "set", "p0", "mtu", "1500")
    passed, said = json.loads(inside(a, ping.format(9000)))[0]
    assert not passed
    assert "too long" in said
