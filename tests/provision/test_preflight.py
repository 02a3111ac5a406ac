"""Every refusal of preflight, on a Spark described as files with one thing wrong."""

from pathlib import Path
from typing import Any

import pytest
from spark import MEMINFO, PAGETYPEINFO, make_spark, smi, write

from tfglm.hosts.facts import large_blocks, read_facts
from tfglm.hosts.preflight import GIB, Wanted, judge
from tfglm.memory.info import read_memory

PORTS = (8888, 29562)
TCP = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_spark(tmp_path)


def said(root: Path, between: tuple[float, float] | None = None, **wanted: Any) -> list[str]:
    memory = read_memory(root)
    facts = read_facts(root, ["/var/lib", "/opt"], PORTS)
    facts["memory"] = {"budget": memory.budget, "unusable": memory.unusable}
    return [str(finding) for finding in judge("spark1", facts, Wanted(ports=PORTS, **wanted), between)]


def only(found: list[str]) -> str:
    assert len(found) == 1, found
    return found[0]


def test_a_spark_as_it_should_be_is_accepted(root: Path) -> None:
    assert said(root, memory_bytes=110 * GIB, large_blocks=500, disks={"/var/lib": 1, "/opt": 1}) == []


def test_facts_of_gb10_have_no_memory_but_all_else(root: Path) -> None:
    gpu = read_facts(root)["gpu"]
    assert (gpu["name"], gpu["driver"], gpu["capability"]) == ("NVIDIA GB10", "580.95.05", "12.1")
    assert (gpu["clock"], gpu["clock_max"], gpu["power"], gpu["temperature"]) == (2418, 3003, 9.8, 41)


def test_another_processor_is_refused_unless_asked_for(root: Path) -> None:
    write(root, "proc/sys/kernel/arch", "x86_64\n")
    assert only(said(root)).startswith("E_WORKER: spark1: its processor is x86_64, not aarch64")
    assert said(root, arch="any") == said(root, arch="x86_64") == []


def test_another_gpu_is_refused_unless_asked_for(root: Path) -> None:
    smi(root, capability="9.0")
    assert "tfglm_gpu=any" in only(said(root))
    assert said(root, gpu="any") == []
    smi(root, capability="8.6")
    assert "below 8.9" in only(said(root, gpu="any"))


def test_no_gpu_is_refused_unless_none_is_wanted(root: Path) -> None:
    (root / "usr/bin/nvidia-smi").unlink()
    assert "finds no GPU" in only(said(root))
    assert said(root, gpu="none") == []


def test_an_old_driver_and_a_bad_kernel_are_refused(root: Path) -> None:
    smi(root, driver="570.1")
    assert "driver is 570.1, older than 580" in only(said(root))
    smi(root)
    assert "6.17.0-1014" in only(said(root, kernels_denied=["6.17.0-1014"]))


def test_who_uses_the_gpu_is_named(root: Path) -> None:
    smi(root, apps="4711, python3, 20480\\n")
    assert only(said(root)).startswith("E_MEMORY: spark1: process 4711 (python3) is on its GPU with 20.0 GiB")
    write(root, "proc/4711/cgroup", "0::/system.slice/system-tfglm.slice/tfglm@1.service\n")
    assert said(root) == []


def test_clocks_that_are_stuck_under_load_are_refused(root: Path) -> None:
    smi(root, clocks="507, 3003, 12.9, 45, 96")
    assert "unplug its power supply" in only(said(root))
    smi(root, clocks="507, 3003, 12.9, 45, 0")
    assert said(root) == []


def test_memory_set_aside_for_kexec_handover_is_refused(root: Path) -> None:
    write(root, "proc/meminfo", MEMINFO.replace("CmaFree:           100000", "CmaFree:          9752000"))
    assert "kho=off" in only(said(root))


def test_too_little_memory_is_refused_with_figures(root: Path) -> None:
    assert "114.4 GiB are available; 120.0 GiB are needed" in only(said(root, memory_bytes=120 * GIB))


def test_memory_in_pieces_is_refused(root: Path) -> None:
    assert large_blocks(root) == 942, "CMA's blocks do not count"
    write(root, "proc/pagetypeinfo", PAGETYPEINFO.replace("    900", "      5"))
    assert "47 free blocks of 4 MiB" in only(said(root, large_blocks=500))


def test_without_pagetypeinfo_buddyinfo_counts(root: Path) -> None:
    (root / "proc/pagetypeinfo").unlink()
    write(
        root,
        "proc/buddyinfo",
        "Node 0, zone   Normal  1 1 1 1 1 1 1 1 1 1 77\nNode 0, zone DMA 0 0 0 0 0 0 0 0 0 0 3\n",
    )
    assert large_blocks(root) == 80


def test_a_running_rank_has_its_memory_and_ports(root: Path) -> None:
    (root / "sys/fs/cgroup/system.slice/system-tfglm.slice/tfglm@1.service").mkdir(parents=True)
    write(root, "proc/net/tcp", TCP + "   0: 00000000:22B8 00000000:0000 0A 0:0 00:0 0 0 0 99\n")
    assert said(root, memory_bytes=500 * GIB, large_blocks=10**6) == []


def test_a_taken_port_names_its_process(root: Path) -> None:
    write(root, "proc/net/tcp", TCP + "   0: 00000000:22B8 00000000:0000 0A 0:0 00:0 0 0 0 99\n")
    (root / "proc/815/fd").mkdir(parents=True)
    (root / "proc/815/fd/7").symlink_to("socket:[99]")
    write(root, "proc/815/cmdline", "nginx\0-g\0")
    assert only(said(root)).startswith("E_PORT: spark1: tcp port 8888 is taken by process 815 (nginx -g)")


def test_a_connection_is_no_listener_and_another_port_is_nobodys(root: Path) -> None:
    connection = "   0: 00000000:22B8 0100007F:1000 01 0:0 00:0 0 0 0 99\n"
    listener = "   1: 00000000:0016 00000000:0000 0A 0:0 00:0 0 0 0 98\n"
    write(root, "proc/net/tcp", TCP + connection + listener)
    assert said(root) == []


def test_docker_must_run_with_a_way_to_the_gpu(root: Path) -> None:
    docker = '#!/bin/sh\necho \'{"ServerVersion": "29", "CgroupVersion": "2", "Runtimes": {"runc": {}}}\'\n'
    write(root, "usr/bin/docker", docker, 0o755)
    assert "no way to the GPU" in only(said(root))
    write(root, "etc/cdi/nvidia.yaml", "cdiVersion: 0.6.0\n")
    assert said(root) == []
    write(root, "usr/bin/docker", "#!/bin/sh\nexit 1\n", 0o755)
    assert "docker does not answer" in only(said(root))
    assert said(root, runtime="venv") == []


def test_control_groups_must_be_version_2(root: Path) -> None:
    (root / "sys/fs/cgroup/cgroup.controllers").unlink()
    assert "control groups are version 1" in only(said(root))


def test_folders_on_one_disk_need_their_sum(root: Path) -> None:
    facts = read_facts(root, ["/var/lib", "/opt"])
    free = facts["disks"]["/var/lib"]["free"]
    assert facts["disks"]["/opt"]["device"] == facts["disks"]["/var/lib"]["device"]
    assert said(root, disks={"/var/lib": free // 2, "/opt": 0}) == []
    assert "/var/lib and /opt" in only(said(root, disks={"/var/lib": free // 2 + GIB, "/opt": free // 2 + GIB}))


def test_a_clock_that_is_off_is_refused(root: Path) -> None:
    now = read_facts(root)["time"]
    assert said(root, (now - 30, now + 30)) == []
    assert "its clock is +" in only(said(root, (now - 130, now - 100)))
    assert "its clock is -" in only(said(root, (now + 100, now + 130)))


def test_a_limit_on_locked_memory_is_said(root: Path) -> None:
    write(root, "proc/1/limits", "Max locked memory         8388608              8388608              bytes\n")
    assert only(said(root)).startswith("W_WORKER: spark1: services may lock 8 MiB")


def test_a_tool_that_hangs_or_fails_is_no_tool(root: Path) -> None:
    write(root, "usr/bin/nvidia-smi", "#!/bin/sh\nexit 9\n", 0o755)
    assert read_facts(root)["gpu"] is None
