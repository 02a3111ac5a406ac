"""From Ansible's variables to what a rank reads: cluster.json and rank.json, checked by the code that will use them."""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import tempfile
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfglm.errors import ConfigError
from tfglm.settings import Settings, env_name, range_text
from tfglm.supervisor.cluster import CLUSTER_FILE, RANK_FILE, VERSION, Limits, read_cluster, read_node
from tfglm.supervisor.fabric import RailState, engine_environment
from tfglm.supervisor.facts import parse
from tfglm.supervisor.runtime import Runtime

PREFIX = "tfglm_"
NOT_VARIABLES = ("ranks", "rank", "leader", "available_gib")
"""Settings that follow from the inventory: as many ranks as machines, in their order, and what each has free."""


def setting_variables() -> list[str]:
    """Ansible's name of every setting that an inventory may give."""
    return [PREFIX + f.name for f in dataclasses.fields(Settings) if f.name not in NOT_VARIABLES]


def inventory_lines() -> str:
    """Every setting as a comment of inventory.example.ini, with its default."""
    lines = []
    for f in dataclasses.fields(Settings):
        if f.name not in NOT_VARIABLES:
            default = int(f.default) if isinstance(f.default, bool) else f.default
            lines += textwrap.wrap(
                f"{f.metadata['reason']} ({range_text(f)})", 116, initial_indent="# ", subsequent_indent="# "
            )
            lines.append(f"#{PREFIX}{f.name}={default}")
    return "\n".join(lines)


def require_known(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError for a variable that nobody knows, which would otherwise do nothing without a word. known: those
    of the roles that are no settings."""
    allowed = [*setting_variables(), *known]
    for name in names:
        if name.startswith(PREFIX) and name not in allowed:
            close = difflib.get_close_matches(name, allowed, 1)
            raise ConfigError(
                f"{name} is in the inventory, but there is no such variable"
                f"{f'; did you mean {close[0]}?' if close else ''}"
            )


def engine_settings(variables: Mapping[str, Any], preset: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Settings as text out of an inventory's variables, over a preset's. Raises ConfigError for one out of range."""
    given = {name: value for name, value in (preset or {}).items() if name not in NOT_VARIABLES}
    given |= {name.removeprefix(PREFIX): variables[name] for name in setting_variables() if name in variables}
    given.pop("api_key", None)
    try:
        Settings.from_sources(given, environ={})
    except ConfigError as error:
        raise ConfigError(as_variables(error.message)) from None
    return {name: str(int(value)) if isinstance(value, bool) else str(value) for name, value in given.items()}


def require_limits(limits: object) -> None:
    """Raise ConfigError for limits that cluster.json could not hold, before anything is downloaded or built for it."""
    parse(Limits, limits, f"{PREFIX}limits")


def as_variables(message: str) -> str:
    """A message of tfglm, which names settings as flags (--kept-gib), in an inventory's words (tfglm_kept_gib)."""
    known = setting_variables()

    def variable(match: re.Match[str]) -> str:
        name = PREFIX + match[1].replace("-", "_")
        return name if name in known else match[0]

    return re.sub(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)", variable, message)


def unpinned(repository: str, revision: str, what: str, hub: str) -> str:
    """Why a repository of the Hub does not say exactly which files it is; empty when it does. what: model or drafter,
    as the variables are named."""
    folder = "set tfglm_checkpoint to a folder that is on rank 0 already"
    if not repository:
        return (
            f"E_CONFIG: tfglm_model_id and tfglm_checkpoint are both empty; name a repository of the Hub, or {folder}"
        )
    if re.fullmatch("[0-9a-f]{40}", revision):
        return ""
    return (
        f"E_CONFIG: {PREFIX}{what}_revision is {revision or 'empty'}; it takes the 40 digits of a commit of "
        f"{repository}, so that every machine and every day serves the same. `git ls-remote {hub}/{repository} HEAD` "
        f"prints today's{f'; or {folder}' if what == 'model' else ''}"
    )


def effective(settings: Mapping[str, str], name: str) -> Any:
    """What a setting is, given or by default."""
    return getattr(Settings.from_sources(dict(settings), environ={}), name)


def member(machine: str, addresses: Mapping[str, Sequence[str]], default: str, wanted: Sequence[str]) -> dict[str, str]:
    """{name, control, interface} of a machine: the first of `wanted` that it has, else the first address of its
    interface `default`. addresses: with prefix length, by interface. Raises ConfigError."""
    here = {_bare(address): netdev for netdev, found in addresses.items() for address in found}
    own = [_bare(address) for address in addresses.get(default, ())]
    control = next((address for address in [*wanted, *own] if address in here), None)
    if control is None:
        raise ConfigError(
            f"{machine} has no address that the others could reach it by: it has {', '.join(here) or 'none'}, the "
            f"inventory says {' or '.join(filter(None, wanted)) or 'none'}; set tfglm_control"
        )
    return {"name": machine, "control": control, "interface": here[control]}


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
    """rank.json of `machine`, which fits `cluster`. members: with `interface`, that of the control address; ports: this
    machine's own; mount: "" where the checkpoint lies on a disk of its own."""
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


def command_line(cluster: Mapping[str, Any], node: Mapping[str, Any], ports: Sequence[Mapping[str, Any]]) -> str:
    """What a rank will run, as one would type it; ports: those of its machine."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / CLUSTER_FILE).write_text(json.dumps(cluster))
        (folder / RANK_FILE).write_text(json.dumps(node))
        facts = read_cluster(folder)
        own = read_node(facts, folder)
    gids = {_bare(a): gid for port in ports for a, gid in zip(port["addresses"], port["gids"], strict=False)}
    rails = tuple(RailState(rail, gids.get(rail.address, -1)) for rail in own.rails)
    return Runtime(facts, own).engine_shown(1, engine_environment(own, rails, len(facts.ranks)))


def plan_lines(plan: Mapping[str, Any], machines: Sequence[str]) -> list[str]:
    """A memory plan of `tfglm plan --json` in a line a rank and one for the window; sizes in GiB."""
    lines = []
    for rank, machine in zip(plan["ranks"], machines, strict=True):
        sizes = {
            name: rank[name] / 2**30 for name in ("weights", "caches", "buffers", "need", "available", "lowest_free")
        }
        figures = ", ".join(f"{name.replace('_', ' ')} {size:.2f}" for name, size in sizes.items())
        lines.append(f"rank {rank['rank']} on {machine}: {figures} GiB")
    fits = "fits" if plan["fits"] else as_variables(plan["refusal"])
    return [*lines, f"window of {plan['context']} tokens, largest {plan['largest_context']}: {fits}"]


def state_lines(state: Mapping[str, Any]) -> list[str]:
    """A line a rank out of a supervisor's state file."""
    lines = []
    for rank in state["ranks"]:
        line = f"rank {rank['rank']} on {rank['name']}: {rank['phase']}"
        line += f" ({rank['reason']})" if rank.get("reason") else ""
        if "available_gib" in rank:
            line += f", {rank['available_gib']} GiB available, {rank['low_gib']} at the lowest, {rank['tok_s']} tok/s"
        lines.append(line)
    return lines


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
