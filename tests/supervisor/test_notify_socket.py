"""systemd's notification protocol, spoken to a socket that listens as systemd does."""

import asyncio
import os
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tfglm.supervisor.cluster import Cluster, Node
from tfglm.supervisor.facts import parse
from tfglm.supervisor.notify import Notifier
from tfglm.supervisor.presence import Presence


class Listener:
    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)

    def heard(self) -> list[str]:
        found = []
        while True:
            try:
                found.append(self.socket.recv(4096).decode())
            except BlockingIOError:
                return found


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Listener, str]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@tfglm-test-{secrets.token_hex(8)}"
    listener = Listener("\0" + name[1:] if name.startswith("@") else name)
    yield listener, name
    listener.socket.close()


def test_what_is_said_arrives(systemd: tuple[Listener, str]) -> None:
    listener, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready()
    notifier.status("waiting for\nrank 2")
    notifier.status("waiting for rank 2")  # the same again is no news
    notifier.more_time(1.5)
    notifier.ping()  # no watchdog was asked for
    notifier.stopping()
    assert listener.heard() == ["READY=1", "STATUS=waiting for rank 2", "EXTEND_TIMEOUT_USEC=1500000", "STOPPING=1"]


def test_pings_are_for_the_process_that_systemd_means(systemd: tuple[Listener, str]) -> None:
    listener, name = systemd
    environ = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000"}
    mine = Notifier(environ | {"WATCHDOG_PID": str(os.getpid())})
    mine.ping()
    mine.ping()  # four times an interval is enough
    Notifier(environ | {"WATCHDOG_PID": "1"}).ping()
    assert listener.heard() == ["WATCHDOG=1"]
    assert mine.watchdog_s == 60


def test_a_systemd_that_does_not_read_blocks_nothing(tmp_path: Path) -> None:
    listener = Listener(str(tmp_path / "full"))
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "full")})
    for i in range(2000):
        notifier.status(f"line {i}")
    assert 0 < len(listener.heard()) < 2000
    listener.socket.close()
    notifier.ready()  # nobody is there any more
    Notifier({}).ready()


async def test_a_loop_that_hangs_sends_no_pings(systemd: tuple[Listener, str], tmp_path: Path) -> None:
    listener, name = systemd
    facts = {"version": 1, "name": "one", "checkpoint": "/x", "ranks": [{"name": "a", "control": "127.0.0.1"}]}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = parse(Cluster, facts | {"ports": {"heartbeat": port}}, "cluster")
    node = parse(Node, {"version": 1, "rank": 0, "interface": "lo"}, "node")
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "400000"})
    presence = Presence(cluster, node, notifier, tmp_path, Path("/"))
    ticking = asyncio.create_task(presence.tick())
    deadline = time.monotonic() + 20
    while listener.heard().count("WATCHDOG=1") < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.5)
    time.sleep(1.0)  # the loop hangs
    hung = listener.heard()
    ticking.cancel()
    presence.beats.close()
    assert hung.count("WATCHDOG=1") <= 1  # one may have been on its way
