"""The two files that provisioning leaves on every node, as facts.

`cluster.json` says what all nodes must agree on and is the same, byte for byte, on each; `rank.json` says what this
node is. Both are written by the engine role and read by `tfglm rank run`, `status` and `doctor`. GID indexes are in
neither: they change with boots and are looked up by address at every start.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tfglm.checkpoint.jsonfile import read_object, shown
from tfglm.errors import ConfigError
from tfglm.hosts.cabling import LEAST_MTU
from tfglm.layout import MAX_RANKS
from tfglm.settings import Settings
from tfglm.supervisor.facts import fact, parse, plain

CONFIG_DIR = Path("/etc/tfglm")
CLUSTER_FILE, RANK_FILE = "cluster.json", "rank.json"
VERSION = 1

_NOT_HERE = {
    "ranks": "it is the number of entries in ranks",
    "rank": "rank.json says it",
    "leader": "it is the control address of rank 0",
    "api_key": "the file is readable by all; systemd passes the key as the credential api_key",
}


@dataclass(frozen=True)
class RailAddress:
    """One end of one rail: a cable's PCIe link has one address on either side."""

    peer: int = fact("rank at the other end", low=0, high=MAX_RANKS - 1)
    address: str = fact("this rank's address on it", address=True)


@dataclass(frozen=True)
class Member:
    """One rank as all others know it."""

    name: str = fact("host name, for messages", filled=True)
    control: str = fact("address on the network that all ranks share: heartbeats and rendezvous", address=True)
    rails: tuple[RailAddress, ...] = fact("its addresses on the cables", ())


@dataclass(frozen=True)
class Ports:
    """Ports on the control network. The API's port is the setting `port`."""

    rendezvous: int = fact("TCP port of rank 0 at which the engines meet", 29561, low=1, high=65535)
    heartbeat: int = fact("UDP port of every supervisor", 29562, low=1, high=65535)
    doctor: int = fact("TCP port of rank 0 at which a trial of the network meets", 29563, low=1, high=65535)


@dataclass(frozen=True)
class Docker:
    """The container runtime; matters with runtime docker."""

    image: str = fact("image reference, tag or digest", "")
    image_hash: str = fact("content hash that the image must carry as label tfglm.hash; empty checks nothing", "")
    gpus: str = fact("how the container gets the GPU", "cdi", choices=("cdi", "legacy", "none"))
    volumes: tuple[str, ...] = fact("more mounts, as docker's --volume takes them", ())
    cache: str = fact("folder of this node for compiled kernels, mounted at /cache", "/var/cache/tfglm", filled=True)
    user: str = fact("uid:gid inside the container; empty takes the supervisor's own", "")
    memory: str = fact(
        "docker's --memory, for example 12g; does not bound what a GPU driver takes; empty sets none", ""
    )


@dataclass(frozen=True)
class Limits:
    """Every wait of the service, in seconds unless said otherwise."""

    mount: float = fact("for the mount of the checkpoint", 300.0, low=0, high=86400)
    fabric: float = fact("for addresses, carriers and GIDs", 600.0, low=0, high=86400)
    plan: float = fact("for the memory plan to be computed", 120.0, low=1, high=3600)
    memory: float = fact("for memory to become free that the plan needs", 120.0, low=0, high=3600)
    peers: float = fact("for all other ranks to be there and prepared", 3600.0, low=1, high=604800)
    join: float = fact("for every rank to start its engine once rank 0 did", 10.0, low=1, high=600)
    start: float = fact("for the engines to load and /health to say ok", 2400.0, low=1, high=86400)
    dead: float = fact(
        "silence after which a peer is taken for dead; all ranks have ended within twice this", 5.0, low=1, high=60
    )
    health: float = fact(
        "that /health of a serving rank 0 may fail before its engine counts as hung", 60.0, low=1, high=3600
    )
    step: float = fact("for one forward of the engine, before it counts as hung", 300.0, low=1, high=86400)
    stop: float = fact("an engine gets to end beyond the setting drain_s, before it is killed", 10.0, low=0, high=600)
    attempts: int = fact("failed starts in a row after which the service gives up", 5, low=1, high=1000)
    backoff: float = fact("before the second attempt; doubles with each further one", 5.0, low=0, high=3600)
    backoff_most: float = fact("longest time between attempts", 300.0, low=0, high=86400)
    stable: float = fact("of serving after which earlier failures are forgotten", 600.0, low=0, high=86400)


@dataclass(frozen=True)
class Cluster:
    """`cluster.json`. rank i is ranks[i]; rank 0 schedules, samples and serves HTTP."""

    version: int = fact("of this format", low=VERSION, high=VERSION)
    name: str = fact("name of the cluster; containers and processes carry it as a label", filled=True)
    checkpoint: str = fact("checkpoint folder, the same path on every node", filled=True)
    ranks: tuple[Member, ...] = fact("the ranks in order")
    settings: Mapping[str, str] = fact("tfglm settings by name, as in the README's table", dict)
    runtime: str = fact("what the engine runs in", "venv", choices=("venv", "docker"))
    command: tuple[str, ...] = fact("the tfglm command, on the node or in the image", ("tfglm",), filled=True)
    environment: Mapping[str, str] = fact("environment of the engine, beside what the supervisor sets", dict)
    ports: Ports = fact("ports on the control network", Ports)  # noqa: RUF009
    docker: Docker = fact("the container runtime", Docker)  # noqa: RUF009
    limits: Limits = fact("limits of every wait", Limits)  # noqa: RUF009

    def tfglm_settings(self) -> Settings:
        """The settings with their types. Raises ConfigError naming the setting, the value and its range."""
        return Settings.from_sources(dict(self.settings), environ={})

    @cached_property
    def digest(self) -> str:
        """16 hex digits over everything in it: ranks with another one do not start together."""
        return hashlib.sha256(json.dumps(plain(self), sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rail:
    """One PCIe link of one cable, as this node sees it."""

    peer: int = fact("rank at the other end", low=0, high=MAX_RANKS - 1)
    interface: str = fact("network interface", filled=True)
    address: str = fact("this node's address on it", address=True)
    peer_address: str = fact("the peer's address on it", address=True)
    mtu: int = fact("what the interface must have at least", 1500, low=LEAST_MTU, high=65535)
    rdma: str = fact("RDMA device of the interface; empty where there is none", "")


@dataclass(frozen=True)
class Node:
    """`rank.json`."""

    version: int = fact("of this format", low=VERSION, high=VERSION)
    rank: int = fact("this node's rank", low=0, high=MAX_RANKS - 1)
    interface: str = fact("interface of the control address", filled=True)
    rails: tuple[Rail, ...] = fact("the rails of this node", ())
    mount: str = fact(
        "mount point that must be mounted before the checkpoint is looked for; empty for a local disk", ""
    )


def read_cluster(directory: Path = CONFIG_DIR) -> Cluster:
    """`cluster.json`. Raises ConfigError naming the file, the field, its value and what it takes."""
    path = directory / CLUSTER_FILE
    if not path.exists():
        raise ConfigError(f"{path} does not exist; tfglm up writes it on every machine of a cluster")
    cluster = parse(Cluster, read_object(path, ConfigError), str(path))
    _check(cluster, str(path))
    return cluster


def read_node(cluster: Cluster, directory: Path = CONFIG_DIR) -> Node:
    """`rank.json`, checked against the cluster. Raises ConfigError as `read_cluster` does."""
    path = directory / RANK_FILE
    node = parse(Node, read_object(path, ConfigError), str(path))
    if node.rank >= len(cluster.ranks):
        raise ConfigError(f"{path}: rank is {node.rank}; {CLUSTER_FILE} has ranks 0 to {len(cluster.ranks) - 1}")
    known = {(rail.peer, rail.address) for rail in cluster.ranks[node.rank].rails}
    for i, rail in enumerate(node.rails):
        if (rail.peer, rail.address) not in known:
            raise ConfigError(
                f"{path}: rails[{i}] has address {rail.address} toward rank {rail.peer}; {CLUSTER_FILE} gives rank "
                f"{node.rank} {_rails_in_words(cluster.ranks[node.rank])}"
            )
    return node


def _rails_in_words(member: Member) -> str:
    return ", ".join(f"{rail.address} toward rank {rail.peer}" for rail in member.rails) or "no rails"


def _check(cluster: Cluster, where: str) -> None:
    """What no field can say alone."""
    count = len(cluster.ranks)
    if not 1 <= count <= MAX_RANKS:
        raise ConfigError(f"{where}: ranks has {count} entries; a cluster has 1 to {MAX_RANKS}")
    if not cluster.command:
        raise ConfigError(
            f'{where}: command is empty; it takes the tfglm command, for example ["/opt/tfglm/bin/tfglm"]'
        )
    _different([member.name for member in cluster.ranks], f"{where}: ranks: name")
    _different([member.control for member in cluster.ranks], f"{where}: ranks: control")
    _check_rails(cluster, where)
    if cluster.ports.rendezvous == cluster.ports.heartbeat:
        raise ConfigError(
            f"{where}: ports: rendezvous and heartbeat are both {cluster.ports.heartbeat}; they must differ"
        )
    if cluster.runtime == "docker" and not cluster.docker.image:
        raise ConfigError(f"{where}: docker: image is empty; runtime docker needs one")
    _check_settings(cluster, where)


def _check_rails(cluster: Cluster, where: str) -> None:
    addresses: list[str] = []
    for i, member in enumerate(cluster.ranks):
        for j, rail in enumerate(member.rails):
            field = f"{where}: ranks[{i}]: rails[{j}]"
            if rail.peer == i or rail.peer >= len(cluster.ranks):
                raise ConfigError(f"{field}: peer is {rail.peer}; rank {i} is cabled to another rank of the cluster")
            addresses.append(rail.address)
    _different(addresses, f"{where}: ranks: rails: address")


def _check_settings(cluster: Cluster, where: str) -> None:
    known = [f.name for f in dataclasses.fields(Settings)]
    for name in cluster.settings:
        if name in _NOT_HERE:
            raise ConfigError(f"{where}: settings: {name} cannot be set here: {_NOT_HERE[name]}")
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{where}: settings: there is no setting {shown(name)}{hint}")
    try:
        settings = cluster.tfglm_settings()
    except ConfigError as error:
        raise ConfigError(f"{where}: settings: {error.message}") from None
    if not settings.port:
        raise ConfigError(f"{where}: settings: port is 0; the service needs one that is known beforehand")


def _different(values: list[str], where: str) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ConfigError(f"{where} {shown(value)} is given more than once; each must be different")
