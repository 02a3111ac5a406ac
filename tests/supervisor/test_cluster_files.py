"""cluster.json and rank.json: what is wrong in them is named with its value, and nothing wrong goes through."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tfglm.errors import ConfigError
from tfglm.supervisor.cluster import Cluster, Docker, Limits, Node, Ports, read_cluster, read_node
from tfglm.supervisor.facts import flat, parse, plain

CLUSTER: dict[str, Any] = {
    "version": 1,
    "name": "lab",
    "checkpoint": "/srv/models/tiny",
    "settings": {"context": 4096, "kv": "bf16", "copy": True, "floor_gib": 0.5},
    "ranks": [
        {"name": "spark0", "control": "10.77.0.10", "rails": [{"peer": 1, "address": "10.0.22.1"}]},
        {"name": "spark1", "control": "10.77.0.11", "rails": [{"peer": 0, "address": "10.0.22.2"}]},
    ],
}
NODE: dict[str, Any] = {
    "version": 1,
    "rank": 1,
    "interface": "eth0",
    "mount": "/srv/models",
    "rails": [
        {"peer": 0, "interface": "enp1s0f0np0", "address": "10.0.22.2", "peer_address": "10.0.22.1", "mtu": 9000}
    ],
}


def write(folder: Path, cluster: object, node: object = None) -> Path:
    (folder / "cluster.json").write_text(json.dumps(cluster))
    (folder / "rank.json").write_text(json.dumps(node))
    return folder


def changed(path: str, value: object) -> dict[str, Any]:
    """CLUSTER with one leaf replaced; path as "ranks.0.control"."""
    cluster = json.loads(json.dumps(CLUSTER))
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    target = cluster
    for part in parents:
        target = target.setdefault(part, {}) if isinstance(target, dict) else target[part]
    target[last] = value
    return cluster


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, CLUSTER, NODE))
    assert cluster.settings == {"context": "4096", "kv": "bf16", "copy": "1", "floor_gib": "0.5"}
    assert cluster.tfglm_settings().context == 4096
    assert cluster.ranks[1].rails[0].address == "10.0.22.2"
    assert (cluster.runtime, cluster.limits.dead, cluster.ports.rendezvous) == ("venv", 5.0, 29561)
    node = read_node(cluster, tmp_path)
    assert (node.rank, node.rails[0].mtu, node.rails[0].rdma) == (1, 9000, "")
    assert parse(Cluster, json.loads(json.dumps(plain(cluster))), "again") == cluster


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("ranks.0.control", "10.77.0", "ranks[0]: control is '10.77.0'; it takes an IP address"),
        ("ranks.1.control", "10.77.0.10", "ranks: control '10.77.0.10' is given more than once"),
        ("ranks.1.rails.0.peer", 1, "ranks[1]: rails[0]: peer is 1"),
        ("ranks.0.rails.0.adress", "10.0.22.1", "'adress' that does not exist; did you mean address?"),
        ("ranks", [], "ranks has 0 entries; a cluster has 1 to 8"),
        ("ranks", "spark0", "ranks is 'spark0'; it takes a list"),
        ("runtime", "podman", "runtime is 'podman'; it takes venv or docker"),
        ("runtime", "docker", "docker: image is empty"),
        ("limits.dead", 0, "limits: dead is 0.0; it takes a number from 1 to 60"),
        ("limits.attempts", 2.5, "limits: attempts is 2.5; it takes a whole number from 1 to 1000"),
        ("limits.attempts", True, "limits: attempts is True; it takes a whole number"),
        ("ports.heartbeat", 29561, "rendezvous and heartbeat are both 29561"),
        ("ports.heartbeat", 70000, "ports: heartbeat is 70000; it takes a whole number from 1 to 65535"),
        ("settings.kv", "fp5", "settings: --kv is 'fp5'; it takes bf16, fp8, fp4, fp4x, fp32"),
        ("settings.contxt", 4096, "there is no setting 'contxt'; did you mean context?"),
        ("settings.ranks", 3, "settings: ranks cannot be set here"),
        ("settings.api_key", "secret", "settings: api_key cannot be set here"),
        ("settings.kv", ["bf16"], "settings: kv is ['bf16']; it takes text or a number"),
        ("version", 2, "version is 2; it takes a whole number from 1 to 1"),
        ("command", [], "command is empty"),
        ("command", [""], "command[0] is ''; it takes text that is not empty"),
        ("checkpoint", "", "checkpoint is ''; it takes text that is not empty"),
    ],
)
def test_every_mistake_is_named_with_its_value(tmp_path: Path, path: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_cluster(write(tmp_path, changed(path, value)))
    assert words in str(refused.value)
    assert "cluster.json" in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_field_says_what_it_is_for(tmp_path: Path) -> None:
    cluster = {name: value for name, value in CLUSTER.items() if name != "checkpoint"}
    with pytest.raises(ConfigError, match=r"cluster\.json lacks checkpoint: checkpoint folder, the same path"):
        read_cluster(write(tmp_path, cluster))
    with pytest.raises(ConfigError, match=r"cluster\.json does not exist; tfglm up writes it"):
        read_cluster(tmp_path / "nothing")


def test_a_node_that_is_not_in_the_cluster_is_refused(tmp_path: Path) -> None:
    cluster = read_cluster(write(tmp_path, CLUSTER, NODE))
    write(tmp_path, CLUSTER, NODE | {"rank": 2})
    with pytest.raises(ConfigError, match=r"rank is 2; cluster\.json has ranks 0 to 1"):
        read_node(cluster, tmp_path)
    write(tmp_path, CLUSTER, NODE | {"rails": [NODE["rails"][0] | {"address": "10.0.23.2"}]})
    with pytest.raises(ConfigError, match=r"has address 10\.0\.23\.2 toward rank 0; .* gives rank 1 10\.0\.22\.2"):
        read_node(cluster, tmp_path)


def test_any_change_changes_the_digest_and_is_found_by_its_path(tmp_path: Path) -> None:
    one = read_cluster(write(tmp_path, CLUSTER))
    other = read_cluster(write(tmp_path, changed("settings.context", 8192)))
    assert one.digest != other.digest
    mine, theirs = flat(plain(one)), flat(plain(other))
    assert {path for path in mine if mine[path] != theirs.get(path)} == {"settings.context"}


def test_every_field_is_documented() -> None:
    for cls in (Cluster, Node, Ports, Docker, Limits):
        for f in dataclasses.fields(cls):
            assert len(f.metadata["doc"]) > 5, f.name
