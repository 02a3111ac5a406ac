"""Filters that judge and write what the roles need, with the code of the tfglm beside this folder."""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tfglm.cli.plan import PRESETS, as_json
from tfglm.errors import ConfigError, MemoryShortError, TfglmError
from tfglm.hosts import cabling
from tfglm.hosts.fabric import Port
from tfglm.hosts.preflight import Wanted, judge
from tfglm.hosts.serving import nonsense
from tfglm.hosts.snapshot import differences
from tfglm.settings import Settings
from tfglm.supervisor import provision
from tfglm.supervisor.playbooks import INSTALL

SPECS, DERIVED = ROOT / "roles/tfglm/meta/argument_specs.yml", ROOT / "roles/tfglm/vars/main.yml"
OWN = ("tfglm_checked", "tfglm_names")
"""Variables that role tfglm sets while it runs."""


def _plain(value: Any) -> Any:
    """Without Ansible's own kinds of text and containers, which carry where they come from."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return str(value)
    return [_plain(item) for item in value] if isinstance(value, Sequence) else value


def _filter(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        try:
            return function(*map(_plain, args), **_plain(named))
        except TfglmError as error:
            raise AnsibleFilterError(str(error)) from None

    return run


def _tried(function: Callable[..., Any]) -> Callable[..., Any]:
    """{value, problem}: for refusals that a task says in one line, instead of a filter's trace."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> dict[str, Any]:
        try:
            return {"value": function(*map(_plain, args), **_plain(named)), "problem": ""}
        except TfglmError as error:
            return {"value": {}, "problem": str(error)}

    return run


def _known_settings(names: Sequence[str]) -> list[str]:
    """`setting_names`, refusing a name that nobody knows."""
    options = yaml.safe_load(SPECS.read_text(encoding="utf-8"))["argument_specs"]["main"]["options"]
    derived = yaml.safe_load(DERIVED.read_text(encoding="utf-8"))
    provision.require_known(names, [*options, *derived, *OWN])
    return sorted(set(names) & set(provision.setting_variables()))


@_filter
def setting_names(names: Sequence[str]) -> list[str]:
    """Those of the variables `names` that are settings of the engine."""
    return sorted(set(names) & set(provision.setting_variables()))


@_tried
def settings(values: Sequence[Any], names: Sequence[str], profile: str, limits: object) -> dict[str, str]:
    """Settings of the engine, over those of a profile. names: of all variables, values: of `setting_names` of them;
    limits: of the service, which are refused as early."""
    known = _known_settings(names)
    provision.require_limits(limits)
    return provision.engine_settings(dict(zip(known, values, strict=True)), PRESETS.get(profile))


@_filter
def findings(host: Mapping[str, Any], machine: str, wanted: Mapping[str, Any], early: float, late: float) -> list[str]:
    """What is wrong with a machine, E_ before W_."""
    known = {field.name for field in fields(Wanted)}
    chosen = Wanted(**{name: value for name, value in wanted.items() if name in known})
    facts = host["host"] | {"memory": host["memory"]}
    return sorted(str(finding) for finding in judge(machine, facts, chosen, (early, late)))


@_filter
def rails(
    fabrics: Mapping[str, Mapping[str, Any]], mode: str, heard: Mapping[str, Any], network: str
) -> list[dict[str, str]]:
    """The rails of a cluster; fabrics: what tfglm_host_info read, by machine."""
    if mode == "none":
        return []
    machines = _machines(fabrics)
    found = cabling.managed_rails(machines, heard, network) if mode == "manage" else cabling.adopted_rails(machines)
    return cabling.as_json(found)


@_filter
def fabric_problems(
    fabrics: Mapping[str, Mapping[str, Any]],
    rails: Sequence[Mapping[str, str]],
    heard: Mapping[str, Any],
    links: Sequence[Mapping[str, str]],
    mtu: int,
) -> list[str]:
    """What is wrong with ports and cables."""
    known = [cabling.Rail(**rail) for rail in rails]
    expected = cabling.declared_cables(links) or [
        (end, port, peer)
        for rail in known
        for end, port, peer in ((rail.a, rail.a_port, rail.b), (rail.b, rail.b_port, rail.a))
    ]
    wrong = [f"E_FABRIC: {message}" for message in cabling.wrong_cables(expected, heard)] if heard else []
    return wrong + cabling.fabric_problems(_machines(fabrics), known, mtu)


@_filter
def netplan(rails: Sequence[Mapping[str, str]], machine: str, mtu: int) -> dict[str, Any]:
    """The netplan file of one machine."""
    return cabling.netplan_of(machine, [cabling.Rail(**rail) for rail in rails], mtu)


@_filter
def ping_targets(
    rails: Sequence[Mapping[str, str]], machine: str, fabrics: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What a machine pings: the other end of each of its rails, with packets as large as both ends take."""
    mtus = {(name, port.netdev): port.mtu for name, ports in _machines(fabrics).items() for port in ports}
    known = [cabling.Rail(**rail) for rail in rails]
    targets = []
    for rail in known:
        if rail.joins(machine):
            port, _, _, address = rail.end(machine)
            mtu = min(mtus[rail.a, rail.a_port], mtus[rail.b, rail.b_port])
            targets.append({"port": port, "address": cabling.address_of(address), "mtu": mtu})
    return targets


@_filter
def lost_pings(pings: Sequence[Mapping[str, Any]], machine: str) -> list[str]:
    """Why rails of a machine cannot be used."""
    return [
        f"E_FABRIC: {machine} {ping['port']} does not reach {ping['address']} with packets of {ping['mtu']} bytes "
        f"({ping['said']}): check the cable, and the MTU of both ends"
        for ping in pings
    ]


@_filter
def subnets(rails: Sequence[Mapping[str, str]], machine: str) -> list[str]:
    """The subnets of a machine's rails, one for each cable end that may mount its export."""
    known = [cabling.Rail(**rail) for rail in rails]
    return sorted({cabling.subnet_of(rail.end(machine)[1]) for rail in known if rail.joins(machine)})


@_filter
def rail_address(rails: Sequence[Mapping[str, str]], machine: str, seen_from: str) -> str:
    """The address of `machine` on its first rail to `seen_from`, "" without one."""
    known = (cabling.Rail(**rail) for rail in rails)
    ends = [rail.end(seen_from) for rail in known if rail.joins(machine) and rail.joins(seen_from)]
    return cabling.address_of(ends[0][3]) if ends else ""


@_filter
def preset_plan(settings: Mapping[str, str], profile: str, available: Sequence[int]) -> dict[str, Any]:
    """The memory plan of a published model, before its checkpoint is there. Needs what tfglm itself needs."""
    if profile not in PRESETS:
        return {}
    try:
        from tfglm.memory.inventory import published
        from tfglm.memory.plan import GPU_CHANGES, make_plan, require
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing where Ansible runs; {INSTALL}") from None
    values = Settings.from_sources({**settings, "ranks": len(available)}, environ={}, defaults=PRESETS[profile])
    model = published(profile)
    plan = make_plan(model, values, list(available))
    refusal = ""
    try:
        require(plan, model, values, GPU_CHANGES)
    except MemoryShortError as error:
        refusal = error.message
    return as_json(plan, values, refusal)


@_tried
def member(fabric: Mapping[str, Any], machine: str, wanted: Sequence[str]) -> dict[str, str]:
    """Name, control address and its interface of a machine."""
    return provision.member(machine, fabric["addresses"], fabric["default_netdev"], wanted)


@_filter
def dependencies(extras: Sequence[str]) -> list[str]:
    """What pip installs for tfglm, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *(name for extra in extras for name in project["optional-dependencies"][extra])]


@_filter
def unit_name(path: str, suffix: str) -> str:
    """systemd's name of the unit of a path: /srv/a-b -> srv-a\\x2db.mount."""
    text = "/".join(part for part in path.split("/") if part)
    escaped = "".join(
        "-" if c == "/" else c if re.fullmatch(r"[A-Za-z0-9:_.]", c) and not (i == 0 and c == ".") else _escaped(c)
        for i, c in enumerate(text)
    )
    return f"{escaped or '-'}.{suffix}"


def _escaped(character: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in character.encode())


def _machines(fabrics: Mapping[str, Mapping[str, Any]]) -> dict[str, list[Port]]:
    return {name: [Port.from_json(port) for port in fabric["ports"]] for name, fabric in fabrics.items()}


class FilterModule:
    """What Ansible asks for."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "tfglm_setting_names": setting_names,
            "tfglm_settings": settings,
            "tfglm_findings": findings,
            "tfglm_rails": rails,
            "tfglm_fabric_problems": fabric_problems,
            "tfglm_netplan": netplan,
            "tfglm_ping_targets": ping_targets,
            "tfglm_lost_pings": lost_pings,
            "tfglm_subnets": subnets,
            "tfglm_rail_address": rail_address,
            "tfglm_unit_name": unit_name,
            "tfglm_differences": _filter(differences),
            "tfglm_cluster_document": _filter(provision.cluster_document),
            "tfglm_node_document": _filter(provision.node_document),
            "tfglm_command": _filter(provision.command_line),
            "tfglm_plan_lines": _filter(provision.plan_lines),
            "tfglm_preset_plan": preset_plan,
            "tfglm_nonsense": _filter(nonsense),
            "tfglm_state_lines": _filter(provision.state_lines),
            "tfglm_setting": _filter(provision.effective),
            "tfglm_member": member,
            "tfglm_dependencies": dependencies,
            "tfglm_plan_environment": _filter(provision.plan_environment),
            "tfglm_as_variables": _filter(provision.as_variables),
            "tfglm_unpinned": _filter(provision.unpinned),
        }
