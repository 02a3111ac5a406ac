"""From Ansible's variables to what a rank reads: cluster.json and rank.json, checked by the code that will use them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError
from tfglm.settings import Settings, env_name
from tfglm.supervisor.cluster import CLUSTER_FILE, RANK_FILE, VERSION, read_cluster, read_node

PREFIX = "tfglm_"
NOT_VARIABLES = ("ranks", "available_gib")
"""Settings that follow from the inventory: as many ranks as machines, and what each has free."""

_YAML_TYPES = {bool: "bool", int: "int", float: "float", str: "str"}


def setting_variables() -> list[str]:
    """Ansible's name of every setting that an inventory may give."""
    return [PREFIX + f.name for f in dataclasses.fields(Settings) if f.name not in NOT_VARIABLES]


def argument_spec() -> dict[str, dict[str, Any]]:
    """The options of role tfglm that stand for settings, as meta/argument_specs.yml has them."""
    options = {}
    for f in dataclasses.fields(Settings):
        if f.name not in NOT_VARIABLES:
            option: dict[str, Any] = {"type": _YAML_TYPES[type(f.default)], "description": _sentence(f)}
            if f.metadata["choices"]:
                option["choices"] = list(f.metadata["choices"])
            options[PREFIX + f.name] = option
    return options


def _sentence(f: dataclasses.Field[Any]) -> str:
    reason = f.metadata["reason"]
    return f"{reason[0].upper()}{reason[1:]}."


def engine_settings(
    variables: Mapping[str, Any], known: Iterable[str], preset: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """Settings as text out of an inventory's variables, over a preset's.

    known: variables of the roles that are no settings. Raises ConfigError for a variable that nobody knows, which would
    otherwise do nothing without a word, and for a value out of range.
    """
    allowed = [*setting_variables(), *known]
    for name in variables:
        if name.startswith(PREFIX) and name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            raise ConfigError(
                f"{name} is in the inventory, but there is no such variable"
                f"{f'; did you mean {close[0]}?' if close else ''}"
            )
    given = {name: value for name, value in (preset or {}).items() if name not in NOT_VARIABLES}
    given |= {name.removeprefix(PREFIX): variables[name] for name in setting_variables() if name in variables}
    given.pop("api_key", None)
    try:
        Settings.from_sources(given, environ={})
    except ConfigError as error:
        flagged = re.sub(r"--([a-z-]+)", lambda m: PREFIX + m[1].replace("-", "_"), error.message, count=1)
        raise ConfigError(flagged) from None
    return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in given.items()}


def cluster_document(
    name: str,
    checkpoint: str,
    members: Sequence[Mapping[str, str]],
    rails: Sequence[Mapping[str, str]],
    settings: Mapping[str, str],
    rest: Mapping[str, Any],
) -> dict[str, Any]:
    """cluster.json. members: {name, control} in the order of ranks; rails: as tfglm.hosts.cabling has them; rest: the
    other fields of Cluster. Raises ConfigError where `tfglm rank run` would."""
    names = [member["name"] for member in members]
    ranks = [
        {
            "name": member["name"],
            "control": member["control"],
            "rails": [
                {"peer": names.index(peer), "address": _bare(address)}
                for _, address, peer, _ in _ends(rails, member["name"])
            ],
        }
        for member in members
    ]
    document = {
        "version": VERSION,
        "name": name,
        "checkpoint": checkpoint,
        "ranks": ranks,
        "settings": dict(settings),
        **rest,
    }
    _require(document)
    return document


def node_document(
    cluster: Mapping[str, Any],
    machine: str,
    members: Sequence[Mapping[str, str]],
    rails: Sequence[Mapping[str, str]],
    ports: Sequence[Mapping[str, Any]],
    mount: str,
) -> dict[str, Any]:
    """rank.json of `machine`, which fits the document `cluster`. members: with `interface`, that of the control address;
    ports: this machine's own; mount: "" where the checkpoint lies on a disk of its own."""
    names = [member["name"] for member in members]
    own = {port["netdev"]: port for port in ports}
    document = {
        "version": VERSION,
        "rank": names.index(machine),
        "interface": members[names.index(machine)]["interface"],
        "rails": [
            {
                "peer": names.index(peer),
                "interface": netdev,
                "address": _bare(address),
                "peer_address": _bare(peer_address),
                "mtu": int(own[netdev]["mtu"]),
                "rdma": own[netdev]["device"],
            }
            for netdev, address, peer, peer_address in _ends(rails, machine)
        ],
        "mount": mount,
    }
    _require(cluster, document)
    return document


def plan_environment(settings: Mapping[str, str], ranks: int, available: Sequence[int]) -> dict[str, str]:
    """The environment of `tfglm plan` for a cluster. available: bytes that each machine may plan on; the plan takes one
    figure for all, so that it is the smallest."""
    chosen = dict(settings) | {"ranks": str(ranks), "available_gib": f"{min(available) / 2**30:.3f}"}
    return {env_name(name): value for name, value in chosen.items()}


def _require(cluster: Mapping[str, Any], node: Mapping[str, Any] | None = None) -> None:
    """Raise what `tfglm rank run` would raise on reading these files."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CLUSTER_FILE).write_text(json.dumps(cluster))
        (folder / RANK_FILE).write_text(json.dumps(node))
        try:
            checked = read_cluster(folder)
            if node is not None:
                read_node(checked, folder)
        except ConfigError as error:
            raise ConfigError(error.message.replace(f"{name}/", "")) from None


def _ends(rails: Iterable[Mapping[str, str]], machine: str) -> list[tuple[str, str, str, str]]:
    """(own port, own address, peer, peer's address) of every rail of `machine`."""
    ends = []
    for rail in rails:
        a, b = ("a", "b") if rail["a"] == machine else ("b", "a")
        if rail[a] == machine:
            ends.append((rail[f"{a}_port"], rail[f"{a}_address"], rail[b], rail[f"{b}_address"]))
    return ends


def _bare(address: str) -> str:
    return address.partition("/")[0]
