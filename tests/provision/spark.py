"""A DGX Spark as a tree of files: what /proc, /sys and its tools say, for modules that take a sysroot."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_interface
from pathlib import Path

CABLE_PORTS = {
    "enp1s0f0np0": ("rocep1s0f0", "0000:01:00.0"),
    "enP2p1s0f0np0": ("roceP2p1s0f0", "0002:01:00.0"),
    "enp1s0f1np1": ("rocep1s0f1", "0000:01:00.1"),
    "enP2p1s0f1np1": ("roceP2p1s0f1", "0002:01:00.1"),
}

MEMINFO = """MemTotal:       127600000 kB
MemFree:        118000000 kB
MemAvailable:   120000000 kB
CmaTotal:          131072 kB
CmaFree:           100000 kB
"""

PAGETYPEINFO = """Page block order: 9
Pages per block:  512

Free pages count per migrate type at order       0      1      2      3      4      5      6      7      8      9     10
Node    0, zone      DMA, type    Unmovable      1      0      1      0      1      0      1      0      0      0      2
Node    0, zone   Normal, type    Unmovable     10     10     10     10     10     10     10     10     10     10     40
Node    0, zone   Normal, type      Movable     10     10     10     10     10     10     10     10     10     10    900
Node    0, zone   Normal, type          CMA      0      0      0      0      0      0      0      0      0      0   2300

Number of blocks type     Unmovable      Movable  Reclaimable   HighAtomic          CMA      Isolate
Node 0, zone      DMA            1            7            0            0            0            0
"""

SMI = """#!/bin/sh
case "$*" in
 *--query-compute-apps=*) printf '{apps}';;
 *name,driver_version*) echo "NVIDIA GB10, {driver}, {capability}";;
 *clocks.sm*) echo "{clocks}";;
esac
"""


def write(root: Path, path: str, text: str, mode: int = 0o644) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    target.chmod(mode)


def make_spark(root: Path, addresses: Mapping[str, Sequence[str]] | None = None, default: str = "enP7s7") -> Path:
    """A healthy machine. addresses: with prefix length, by netdev."""
    addresses = addresses or {}
    write(root, "proc/sys/kernel/arch", "aarch64\n")
    write(root, "proc/sys/kernel/osrelease", "6.17.0-1014-nvidia\n")
    write(root, "proc/cmdline", "root=/dev/nvme0n1p2 kho=off\n")
    write(root, "proc/meminfo", MEMINFO)
    write(root, "proc/pagetypeinfo", PAGETYPEINFO)
    write(root, "proc/swaps", "Filename Type Size Used Priority\n/swap.img file 16777212 0 -2\n")
    write(root, "proc/pressure/memory", "some avg10=0.00\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n")
    write(root, "proc/1/limits", "Max locked memory         unlimited            unlimited            bytes\n")
    write(root, "sys/fs/cgroup/cgroup.controllers", "cpu memory\n")
    write(root, "var/lib/x", "")
    smi(root)
    info = {"ServerVersion": "29.2.1", "CgroupVersion": "2", "Runtimes": {"runc": {}, "nvidia": {}}}
    write(root, "usr/bin/docker", f"#!/bin/sh\necho '{json.dumps(info)}'\n", 0o755)
    for port in [*CABLE_PORTS, default, "lo"]:
        netdev(root, port, addresses.get(port, ()))
    network(root, addresses, default)
    return root


def smi(root: Path, apps: str = "", driver: str = "580.95.05", capability: str = "12.1", clocks: str = "") -> None:
    said = {"apps": apps, "driver": driver, "capability": capability}
    write(root, "usr/bin/nvidia-smi", SMI.format(**said, clocks=clocks or "2418, 3003, 9.8, 41, 0"), 0o755)


def netdev(root: Path, name: str, addresses: Sequence[str], *, up: bool = True, mtu: int = 9000) -> None:
    folder = root / "sys/class/net" / name
    for file, text in {"address": "aa:bb:cc:00:00:01", "carrier": "01"[up], "mtu": str(mtu), "speed": "200000"}.items():
        write(root, f"sys/class/net/{name}/{file}", text + "\n")
    if name not in CABLE_PORTS:
        return
    device, pci = CABLE_PORTS[name]
    function = root / "sys/devices" / pci
    (function / "infiniband" / device).mkdir(parents=True, exist_ok=True)
    if not (folder / "device").is_symlink():
        (folder / "device").symlink_to(Path("../../../devices") / pci)
    # As the kernel fills the table: link-local first, each address once for RoCE v1 and once for v2.
    entries = [
        ("fe80:0000:0000:0000:aabb:ccff:fe00:0001", "IB/RoCE v1"),
        ("fe80:0000:0000:0000:aabb:ccff:fe00:0001", "RoCE v2"),
    ]
    for address in addresses:
        words = ip_address(int(ip_interface(address).ip)).packed.hex()
        gid = f"0000:0000:0000:0000:0000:ffff:{words[:4]}:{words[4:]}"
        entries += [(gid, "IB/RoCE v1"), (gid, "RoCE v2")]
    for index, (gid, kind) in enumerate([*entries, ("0000:" * 7 + "0000", "")]):
        gids(root, device, index, gid, kind, name)


def gids(root: Path, device: str, index: int, gid: str, kind: str, owner: str) -> None:
    port = f"sys/class/infiniband/{device}/ports/1"
    write(root, f"{port}/gids/{index}", gid + "\n")
    if kind:
        write(root, f"{port}/gid_attrs/types/{index}", kind + "\n")
        write(root, f"{port}/gid_attrs/ndevs/{index}", owner + "\n")


def network(root: Path, addresses: Mapping[str, Sequence[str]], default: str) -> None:
    """/proc/net/route and fib_trie of these addresses."""

    def word(text: str) -> str:
        return ip_address(text).packed[::-1].hex().upper()

    routes = ["Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT"]
    routes.append(f"{default}\t00000000\t{word('192.168.1.1')}\t0003\t0\t0\t100\t00000000\t0\t0\t0")
    trie = ["Local:", "  +-- 0.0.0.0/0 3 0 5"]
    for name, found in {"lo": ("127.0.0.1/8",), **addresses}.items():
        for address in found:
            own = ip_interface(address)
            mask = word(str(own.netmask))
            if name != "lo":
                routes.append(
                    f"{name}\t{word(str(own.network.network_address))}\t00000000\t0001\t0\t0\t0\t{mask}\t0\t0\t0"
                )
            trie += [f"           |-- {own.ip}", "              /32 host LOCAL"]
    write(root, "proc/net/route", "\n".join(routes) + "\n")
    write(root, "proc/net/fib_trie", "\n".join(trie) + "\n")
