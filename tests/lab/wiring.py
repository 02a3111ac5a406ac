"""The lab's network: a management bridge and one two-port bridge a cable, in a namespace that only the lab is in."""

from __future__ import annotations

from host import run

GATEWAY = "10.77.0.1"
"""Where the driver itself is."""
CABLES = ("01", "12", "02")
"""The triangle: port 0 of each Spark goes to port 1 of the next, as the switchless wiring of three Sparks wants it."""
PORTS = {0: ("01", "02"), 1: ("12", "01"), 2: ("02", "12")}
"""The cables of each guest's port 0 and port 1."""


def address(guest: int) -> str:
    return f"10.77.0.{10 + guest}"


def tap(cable: str, guest: int) -> str:
    return f"c{cable}n{guest}"


def up() -> None:
    """Make it. A tap's MTU is set before it joins a bridge, which takes the smallest of its members'."""
    _ip("link set lo up")
    _ip("link add mgmt type bridge")
    _ip(f"addr add {GATEWAY}/24 dev mgmt")
    _ip("link set mgmt up")
    # User-mode Linux drops large frames it did not negotiate: small packets pass, and bulk copies stand still.
    run(["ethtool", "-K", "mgmt", "tso", "off", "gso", "off", "gro", "off"], 10)
    for guest in PORTS:
        _ip(f"tuntap add m{guest} mode tap")
        _ip(f"link set m{guest} master mgmt up")
    for cable in CABLES:
        _ip(f"link add c{cable} type bridge")
        for end in cable:
            _ip(f"tuntap add {tap(cable, int(end))} mode tap")
            _ip(f"link set {tap(cable, int(end))} mtu 9000 master c{cable} up")
        _ip(f"link set c{cable} mtu 9000 up")


def plug(port: str, cable: str) -> None:
    """Put the end of a cable into another one's bridge: a cable in the wrong port, or back in its own."""
    _ip(f"link set {port} master c{cable}")


def cut(cable: str) -> None:
    """Frames no longer pass. The guests keep their carrier, as behind a switch: silence is all they can notice."""
    _ip(f"link set c{cable} down")


def join(cable: str) -> None:
    _ip(f"link set c{cable} up")


def _ip(words: str) -> None:
    run(["ip", *words.split()], 10)
