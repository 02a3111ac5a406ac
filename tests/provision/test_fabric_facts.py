"""Ports, twins and GIDs of a Spark described as files."""

import json
import subprocess
from pathlib import Path

import pytest
from spark import gids, make_spark, netdev, write

from tfglm.hosts.fabric import Port, gid_index, gid_of, links_between, read_fabric, unlinked_pairs

ADDRESSES = {
    "enP7s7": ["192.168.1.20/24"],
    "enp1s0f0np0": ["10.0.22.1/24"],
    "enP2p1s0f0np0": ["10.0.32.1/24"],
    "enp1s0f1np1": ["10.0.23.1/24"],
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_spark(tmp_path, ADDRESSES)


def test_ports_are_what_has_an_rdma_device_twin_by_twin(root: Path) -> None:
    ports = read_fabric(root).ports
    assert [port.netdev for port in ports] == ["enp1s0f0np0", "enP2p1s0f0np0", "enp1s0f1np1", "enP2p1s0f1np1"]
    assert [port.cable for port in ports] == ["f0np0", "f0np0", "f1np1", "f1np1"]
    assert [port.device for port in ports] == ["rocep1s0f0", "roceP2p1s0f0", "rocep1s0f1", "roceP2p1s0f1"]
    assert [port.addresses for port in ports] == [("10.0.22.1/24",), ("10.0.32.1/24",), ("10.0.23.1/24",), ()]
    assert all(port.up and port.mtu == 9000 and port.speed == 200000 for port in ports)


def test_the_gid_is_the_v2_one_of_the_address(root: Path) -> None:
    assert gid_of("10.0.22.1") == "0000:0000:0000:0000:0000:ffff:0a00:1601"
    assert [port.gids for port in read_fabric(root).ports] == [(3,), (3,), (3,), ()]


def test_a_gid_of_another_netdev_or_of_v1_alone_is_none(root: Path) -> None:
    gid = gid_of("10.0.22.1")
    gids(root, "rocep1s0f0", 3, gid, "RoCE v2", "bond0")
    assert gid_index(root, "rocep1s0f0", "10.0.22.1/24", "enp1s0f0np0") == -1
    assert gid_index(root, "rocep1s0f0", "10.0.22.1/24") == 3
    gids(root, "rocep1s0f0", 3, gid, "IB/RoCE v1", "enp1s0f0np0")
    assert gid_index(root, "rocep1s0f0", "10.0.22.1/24") == -1
    assert gid_index(root, "no_such_device", "10.0.22.1/24") == -1


def test_gids_are_tried_in_the_order_of_numbers_not_of_text(root: Path) -> None:
    gids(root, "rocep1s0f0", 10, gid_of("10.9.9.9"), "RoCE v2", "enp1s0f0np0")
    gids(root, "rocep1s0f0", 9, gid_of("10.9.9.9"), "RoCE v2", "enp1s0f0np0")
    assert gid_index(root, "rocep1s0f0", "10.9.9.9") == 9


def test_named_ports_need_no_rdma(root: Path) -> None:
    fabric = read_fabric(root, ["enP7s7"])
    assert [(port.netdev, port.device, port.gids) for port in fabric.ports] == [("enP7s7", "", ())]


def test_every_address_and_the_default_interface_are_known(root: Path) -> None:
    fabric = read_fabric(root)
    assert fabric.default_netdev == "enP7s7"
    assert fabric.addresses == {name: tuple(found) for name, found in ADDRESSES.items()}


def test_a_software_device_is_found_by_its_table_of_gids(root: Path) -> None:
    gids(root, "rxe0", 1, gid_of("192.168.1.20"), "RoCE v2", "enP7s7")
    port = next(port for port in read_fabric(root).ports if port.netdev == "enP7s7")
    assert (port.device, port.gids) == ("rxe0", (1,))


def test_netplan_files_that_name_a_port_are_named(root: Path) -> None:
    write(root, "etc/netplan/40-cx7.yaml", "network:\n  ethernets:\n    enp1s0f0np0: {mtu: 1500}\n    eno1: {}\n")
    write(root, "etc/netplan/01-lan.yaml", "network:\n  ethernets:\n    enP7s7:\n      dhcp4: true\n")
    assert read_fabric(root).netplan == {"40-cx7.yaml": ("enp1s0f0np0",)}


def test_facts_survive_json(root: Path) -> None:
    for port in read_fabric(root).ports:
        assert Port.from_json(json.loads(json.dumps(port.as_json()))) == port


def test_links_are_shared_subnets(tmp_path: Path) -> None:
    machines = {}
    for number, ports in enumerate((("10.1.0.1/24", "10.2.0.1/24"), ("10.3.0.1/24", "10.1.0.2/24"), ("10.9.0.1/24",))):
        addresses = dict(zip(("enp1s0f0np0", "enp1s0f1np1"), ([a] for a in ports), strict=False))
        machines[f"s{number}"] = read_fabric(make_spark(tmp_path / str(number), addresses)).ports
    links = links_between(machines)
    assert [(x.a, x.a_port.netdev, x.b, x.b_port.netdev, x.subnet) for x in links] == [
        ("s0", "enp1s0f0np0", "s1", "enp1s0f1np1", "10.1.0.0/24")
    ]
    assert unlinked_pairs(machines, links) == [("s0", "s2"), ("s1", "s2")]


def test_an_unplugged_port_has_no_carrier(root: Path) -> None:
    netdev(root, "enp1s0f1np1", (), up=False)
    assert [port.up for port in read_fabric(root).ports] == [True, True, False, True]


def test_this_machine_agrees_with_ip() -> None:
    try:
        said = subprocess.run(["ip", "-json", "-4", "address"], capture_output=True, check=True, timeout=20)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("ip is not there")
    theirs = {
        entry["ifname"]: {f"{a['local']}/{a['prefixlen']}" for a in entry["addr_info"]}
        for entry in json.loads(said.stdout)
        if entry["ifname"] != "lo" and any(a["prefixlen"] < 32 for a in entry["addr_info"])
    }
    assert {name: set(found) for name, found in read_fabric().addresses.items()} == theirs
