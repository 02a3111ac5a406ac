"""cluster.json and rank.json out of an inventory, read by what reads them on a Spark."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tfglm.errors import ConfigError
from tfglm.settings import Settings
from tfglm.supervisor import provision
from tfglm.supervisor.cluster import read_cluster, read_node

MEMBERS = [{"name": f"s{i}", "control": f"192.168.1.2{i}", "interface": "lan"} for i in range(3)]
RAILS = [
    {"a": a, "a_port": "p0", "a_address": f"10.0.{i}.1/24", "b": b, "b_port": "p1", "b_address": f"10.0.{i}.2/24"}
    for i, (a, b) in enumerate((("s0", "s1"), ("s0", "s2"), ("s1", "s2")))
]
PORTS = [
    {"netdev": "p0", "device": "roce0", "mtu": 9000, "addresses": ["10.0.2.1/24"], "gids": [3]},
    {"netdev": "p1", "device": "", "mtu": 1500, "addresses": ["10.0.0.2/24"], "gids": []},
]


def cluster(**rest: Any) -> dict[str, Any]:
    return provision.cluster_document("c", "/m", MEMBERS, RAILS, {"context": "4096"}, rest)


def test_the_documents_are_what_a_rank_reads(tmp_path: Path) -> None:
    document = cluster(runtime="venv", ports={"rendezvous": 1234})
    node = provision.node_document(document, "s1", MEMBERS, RAILS, PORTS, "/mnt")
    (tmp_path / "cluster.json").write_text(json.dumps(document))
    (tmp_path / "rank.json").write_text(json.dumps(node))
    facts = read_cluster(tmp_path)
    own = read_node(facts, tmp_path)
    assert [member.control for member in facts.ranks] == ["192.168.1.20", "192.168.1.21", "192.168.1.22"]
    assert facts.tfglm_settings().context == 4096
    assert (facts.ports.rendezvous, facts.ports.heartbeat) == (1234, 29562)
    assert (own.rank, own.interface, own.mount) == (1, "lan", "/mnt")
    assert [(r.peer, r.interface, r.address, r.peer_address, r.mtu, r.rdma) for r in own.rails] == [
        (0, "p1", "10.0.0.2", "10.0.0.1", 1500, ""),
        (2, "p0", "10.0.2.1", "10.0.2.2", 9000, "roce0"),
    ]


def test_what_a_rank_would_refuse_is_refused_before_it_is_written() -> None:
    with pytest.raises(ConfigError, match=r" cluster.json: limits .* 'mounts' .* did you mean mount\?"):
        cluster(limits={"mounts": 3})


def test_the_command_line_is_the_engines() -> None:
    document = cluster(runtime="venv", command=["/opt/tfglm/bin/tfglm"])
    node = provision.node_document(document, "s1", MEMBERS, RAILS, PORTS, "")
    line = provision.command_line(document, node, PORTS)
    assert "/opt/tfglm/bin/tfglm engine /m --rank 1 --ranks 3 --leader 192.168.1.20:29561" in line
    assert "NCCL_IB_HCA=roce0" in line
    assert "NCCL_IB_GID_INDEX=3" in line
    assert "TFGLM_CONTEXT=4096" in line


@pytest.mark.parametrize(
    ("checkpoint", "mount", "source"),
    [
        ("/home/u/hf/hub/models--a--b/snapshots/0", "", "/home/u/hf"),
        ("/home/u/hf/hub/models--a--b/snapshots/0", "/home/u/hf", "/home/u/hf"),
        ("/srv/models/tiny", "", "/srv/models/tiny"),
    ],
)
def test_a_container_sees_what_a_snapshot_links_to(checkpoint: str, mount: str, source: str) -> None:
    document = cluster(runtime="docker", docker={"image": "x"}) | {"checkpoint": checkpoint}
    node = provision.node_document(document, "s0", MEMBERS, RAILS, PORTS, mount)
    assert f"--volume {source}:{source}:ro" in provision.command_line(document, node, PORTS)


def test_every_setting_can_be_given_and_its_range_holds() -> None:
    for f in dataclasses.fields(Settings):
        if f.name in provision.NOT_VARIABLES or f.name == "api_key":
            continue
        name = f"tfglm_{f.name}"
        value = f.metadata["choices"][-1] if f.metadata["choices"] else f.metadata["high"]
        value = (True if isinstance(f.default, bool) else "some text") if value is None else value
        found = provision.engine_settings({name: value})
        assert getattr(Settings.from_sources(found, environ={}), f.name) == value, f.name
        if f.metadata["high"] is not None:
            with pytest.raises(ConfigError, match=name):
                provision.engine_settings({name: f.metadata["high"] + 1})


def test_the_inventory_goes_before_the_profile_and_secrets_stay_out() -> None:
    preset = {"context": 1000, "kv": "fp4", "ranks": 3, "available_gib": 100.0, "cp": True}
    given = {"tfglm_context": 2000, "tfglm_api_key": "secret", "tfglm_copy": False, "tfglm_home": "/opt"}
    found = provision.engine_settings(given, preset)
    assert found == {"context": "2000", "kv": "fp4", "cp": "1", "copy": "0"}


def test_settings_are_named_as_the_inventory_has_them() -> None:
    said = "--context 4096 fits; --kept-gib 0 saves 1.00 GiB; --cp 1 too; see --help, hf --quiet and a--kv"
    assert provision.as_variables(said) == (
        "tfglm_context 4096 fits; tfglm_kept_gib 0 saves 1.00 GiB; tfglm_cp 1 too; see --help, hf --quiet and a--kv"
    )


def test_a_misspelt_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"tfglm_contxt .* did you mean tfglm_context\?"):
        provision.require_known(["tfglm_contxt"], [])
    with pytest.raises(ConfigError, match="tfglm_ranks"):
        provision.require_known(["tfglm_ranks"], [])
    provision.require_known(["tfglm_context", "tfglm_home", "ansible_host"], ["tfglm_home"])


def test_a_limit_that_no_service_has_is_refused() -> None:
    provision.require_limits({"start": 3600})
    with pytest.raises(ConfigError, match=r"tfglm_limits.*'strat' that does not exist; did you mean start\?"):
        provision.require_limits({"strat": 3600})
    with pytest.raises(ConfigError, match=r"tfglm_limits: start is"):
        provision.require_limits({"start": 0})


def test_a_machine_is_reached_by_what_the_inventory_says_or_by_its_default_route() -> None:
    addresses = {"lan": ["192.168.1.20/24"], "wifi": ["10.0.0.9/24"]}
    by_host = provision.member("s0", addresses, "lan", ["", "10.0.0.9"])
    assert by_host == {"name": "s0", "control": "10.0.0.9", "interface": "wifi"}
    assert provision.member("s0", addresses, "lan", ["", "a-name"])["control"] == "192.168.1.20"
    with pytest.raises(ConfigError, match=r"s0 has no address .* set tfglm_control"):
        provision.member("s0", {}, "lan", ["", "a-name"])


def test_the_plan_reckons_with_the_machine_that_has_least() -> None:
    found = provision.plan_environment({"context": "9"}, 3, [5 * 2**30, 4 * 2**30, 6 * 2**30])
    assert found == {"TFGLM_CONTEXT": "9", "TFGLM_RANKS": "3", "TFGLM_AVAILABLE_GIB": "4.000"}


def test_plan_and_state_in_lines() -> None:
    sizes = dict.fromkeys(("weights", "caches", "buffers", "need", "available", "lowest_free"), 2**30)
    plan = {
        "ranks": [{"rank": 0, **sizes}],
        "fits": False,
        "refusal": "--kv fp4 saves",
        "context": 5,
        "largest_context": 3,
    }
    assert provision.plan_lines(plan, ["s0"]) == [
        "rank 0 on s0: weights 1.00, caches 1.00, buffers 1.00, need 1.00, available 1.00, lowest free 1.00 GiB",
        "window of 5 tokens, largest 3: tfglm_kv fp4 saves",
    ]
    figures = {"available_gib": 9.5, "low_gib": 8.0, "tok_s": 31.3}
    ranks = [{"rank": 0, "name": "s0", "phase": "serving", "reason": "", **figures}]
    ranks.append({"rank": 1, "name": "s1", "phase": "unknown", "reason": "not heard of yet"})
    assert provision.state_lines({"ranks": ranks}) == [
        "rank 0 on s0: serving, 9.5 GiB available, 8.0 at the lowest, 31.3 tok/s",
        "rank 1 on s1: unknown (not heard of yet)",
    ]
