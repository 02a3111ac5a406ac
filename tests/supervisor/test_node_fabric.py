"""A node's ports out of a made-up /sys: what is missing is named, GIDs are found by address."""

from pathlib import Path

import pytest

from tfglm.supervisor.cluster import Node
from tfglm.supervisor.fabric import address_is_here, engine_environment, missing, resolve, traffic
from tfglm.supervisor.facts import parse

NODE = {
    "version": 1,
    "rank": 1,
    "interface": "enP7s7",
    "rails": [
        {
            "peer": peer,
            "interface": f"enp1s0f{port}np{port}",
            "address": f"10.0.2{port}.2",
            "peer_address": f"10.0.2{port}.1",
            "mtu": 9000,
            "rdma": f"rocep1s0f{port}",
        }
        for port, peer in ((0, 0), (1, 2))
    ],
}


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(root: Path, gid: int = 3) -> Path:
    """Two ports with RDMA; the GID of port f0 has index `gid`, that of f1 index 3."""
    for port, index in ((0, gid), (1, 3)):
        net = root / f"sys/class/net/enp1s0f{port}np{port}"
        for name, value in (("carrier", 1), ("mtu", 9000), ("speed", 200000)):
            write(net / name, value)
        device = root / f"sys/class/infiniband/rocep1s0f{port}/ports/1"
        address = f"0000:0000:0000:0000:0000:ffff:0a00:{20 + port:02x}02"
        entries = {0: ("fe80:0000:0000:0000:0000:0000:0000:0001", "IB/RoCE v1"), index - 1: (address, "IB/RoCE v1")}
        for entry, (value, kind) in (entries | {index: (address, "RoCE v2")}).items():
            write(device / "gids" / str(entry), value)
            write(device / "gid_attrs/types" / str(entry), kind)
            write(device / "gid_attrs/ndevs" / str(entry), f"enp1s0f{port}np{port}")
        write(device / "gids/9", "0000:0000:0000:0000:0000:0000:0000:0000")
        write(device / "counters/port_rcv_data", 1000 + port)
        write(device / "counters/port_xmit_data", 500)
    return root


def node() -> Node:
    for rail, port in zip(NODE["rails"], (20, 21), strict=True):  # type: ignore[call-overload]
        rail["address"], rail["peer_address"] = f"10.0.{port}.2", f"10.0.{port}.1"
    return parse(Node, NODE, "rank.json")


def here(address: str) -> bool:
    return address in ("10.77.0.11", "10.0.20.2", "10.0.21.2")


def test_a_complete_machine_lacks_nothing(tmp_path: Path) -> None:
    root = machine(tmp_path)
    assert missing(node(), "10.77.0.11", root, here) == ""
    assert [state.gid for state in resolve(node(), root)] == [3, 3]


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("net/enp1s0f0np0/carrier", "0", "carrier on enp1s0f0np0 (rail to rank 0)"),
        ("net/enp1s0f1np1/mtu", "1500", "MTU 9000 on enp1s0f1np1, which has 1500 (rail to rank 2)"),
        (
            "infiniband/rocep1s0f1/ports/1/gid_attrs/types/3",
            "IB/RoCE v1",
            "a RoCE v2 GID for 10.0.21.2 on rocep1s0f1 (rail to rank 2)",
        ),
    ],
)
def test_what_a_port_lacks_is_named(tmp_path: Path, file: str, text: str, words: str) -> None:
    root = machine(tmp_path)
    write(root / "sys/class" / file, text)
    assert missing(node(), "10.77.0.11", root, here) == words


def test_a_missing_interface_or_address_is_named(tmp_path: Path) -> None:
    assert missing(node(), "10.77.0.99", tmp_path, here) == "address 10.77.0.99 on enP7s7"
    assert "interface enp1s0f0np0, which is gone" in missing(node(), "10.77.0.11", tmp_path, here)
    root = machine(tmp_path)
    found = missing(node(), "10.77.0.11", root, lambda address: here(address) and address != "10.0.21.2")
    assert found == "address 10.0.21.2 on enp1s0f1np1 (rail to rank 2)"


def test_a_gid_that_is_where_it_was_is_not_looked_for_and_one_that_moved_is_found(tmp_path: Path) -> None:
    root = machine(tmp_path)
    gids: dict[str, int] = {}
    table = root / "sys/class/infiniband/rocep1s0f0/ports/1/gids"
    assert missing(node(), "10.77.0.11", root, here, gids) == ""
    assert gids == {"10.0.20.2": 3, "10.0.21.2": 3}
    write(table / "0", "0000:0000:0000:0000:0000:ffff:0a00:1402")
    write(root / "sys/class/infiniband/rocep1s0f0/ports/1/gid_attrs/types/0", "RoCE v2")
    assert missing(node(), "10.77.0.11", root, here, gids) == ""
    assert gids["10.0.20.2"] == 3, "an earlier entry of the same kind is as good, and nobody looked"
    write(table / "3", "fe80:0000:0000:0000:0000:0000:0000:0001")
    assert missing(node(), "10.77.0.11", root, here, gids) == ""
    assert gids["10.0.20.2"] == 0
    write(table / "0", "fe80:0000:0000:0000:0000:0000:0000:0001")
    assert missing(node(), "10.77.0.11", root, here, gids).startswith("a RoCE v2 GID for 10.0.20.2 on rocep1s0f0")


def test_nccl_gets_one_gid_index_only_where_one_holds_for_all(tmp_path: Path) -> None:
    same = engine_environment(node(), resolve(node(), machine(tmp_path / "same")), 3)
    assert same["NCCL_IB_HCA"] == "rocep1s0f0,rocep1s0f1"
    assert same["NCCL_IB_GID_INDEX"] == "3"
    assert same["NCCL_SOCKET_IFNAME"] == same["GLOO_SOCKET_IFNAME"] == "enP7s7"
    assert same["NCCL_CROSS_NIC"] == same["NCCL_IB_SUBNET_AWARE_ROUTING"] == "1"
    other = engine_environment(node(), resolve(node(), machine(tmp_path / "other", gid=4)), 2)
    assert "NCCL_IB_GID_INDEX" not in other
    assert "NCCL_CROSS_NIC" not in other


def test_rdma_bytes_are_counted_where_rdma_counts_them(tmp_path: Path) -> None:
    root = machine(tmp_path)
    found = traffic(node().rails[1], root)
    assert (found.received, found.sent, found.mbit) == (4004, 2000, 200000)


def test_a_real_address_of_this_machine_is_here() -> None:
    assert address_is_here("127.0.0.1")
    assert not address_is_here("203.0.113.7")  # set aside for documentation
