"""Every setting once: name, default, range and reason. Command-line flags, the TFGLM_* environment and the README table
are made from this module; nothing else states a default.

Precedence: command line, then environment, then default.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tfglm.errors import ConfigError

ENV_PREFIX = "TFGLM_"


def _setting(
    default: Any,
    reason: str,
    *,
    low: float | None = None,
    high: float | None = None,
    also: float | None = None,
    choices: tuple[str, ...] = (),
    commands: tuple[str, ...] = ("serve",),
) -> Any:
    """also: a value outside of low to high that is taken too. commands: which of them take it as a flag."""
    meta = {"reason": reason, "low": low, "high": high, "also": also, "choices": choices, "commands": commands}
    return field(default=default, metadata=meta)


DENSE_FORMATS = ("bf16", "fp8", "q8", "q6", "q4")
"""In which a linear layer outside the routed experts can be held on a GPU."""
_BOTH = ("serve", "plan")
_PLAN = ("plan",)


@dataclass(frozen=True)
class Settings:
    """The settings of one server, and of the cluster that `tfglm plan` reckons with. Field types are str, int, float or
    bool; `from_sources` checks every range."""

    host: str = _setting("127.0.0.1", "address to listen on; loopback, so that nothing is public by accident")
    port: int = _setting(8888, "port to listen on; 0 takes a free one and prints it", low=0, high=65535)
    api_key: str = _setting("", "comma-separated keys clients must send; empty asks for none")
    served_name: str = _setting("", "model name in the API; empty takes the checkpoint folder's name")
    device: str = _setting(
        "auto",
        "where the model runs; auto takes an NVIDIA GPU of compute capability 8.9 or later, else the CPU",
        choices=("auto", "cpu", "cuda"),
    )
    threads: int = _setting(0, "CPU threads of the forward pass; 0 takes one a core", low=0, high=1024)
    context: int = _setting(
        0,
        "window of one request, prompt + reply, in tokens; 0 takes the largest that fits (on a CPU up to 131072) and "
        "keeps it for later starts",
        low=0,
        high=1048576,
        commands=_BOTH,
    )
    parallel: int = _setting(4, "requests decoded together, each with its own window", low=1, high=8, commands=_BOTH)
    max_queued: int = _setting(64, "requests that may wait; one more is answered 429", low=0, high=100000)
    prefill_rows: int = _setting(
        256,
        "prompt tokens a forward; small enough that a cancelled prompt stops at once",
        low=16,
        high=4096,
        commands=_BOTH,
    )
    prefill_share: float = _setting(
        0.68,
        "share of the time that reading a prompt gets while other replies are being written; 1 takes turns",
        low=0.05,
        high=1,
    )
    kv: str = _setting(
        "bf16",
        "format of the latent cache; fp32 is a CPU's only, for comparing with other engines",
        choices=("bf16", "fp8", "fp4", "fp4x", "fp32"),
        commands=_BOTH,
    )
    drafter: str = _setting(
        "auto",
        "model that guesses tokens ahead, which never changes a reply; auto takes the best one that is there",
        choices=("auto", "mtp", "dspark", "dflash2", "none"),
        commands=_BOTH,
    )
    drafter_path: str = _setting(
        "", "folder of a dspark or dflash2 drafter: config.json and safetensors", commands=_BOTH
    )
    copy: bool = _setting(True, "also guess that a reply goes on as the prompt or the reply once did")
    copy_corpus: int = _setting(
        0,
        "tokens of finished replies that later requests may copy from; 0 keeps requests apart: speed could tell one "
        "client what another was told",
        low=0,
        high=16777216,
    )
    draft_noise: float = _setting(
        1.0, "share of the reply's own noise in the choice of sampled drafts; 0 drafts greedily", low=0, high=2
    )
    draft_trace: str = _setting(
        "", "file to write every possible draft into, for tfglm bench drafts; replies then come one token at a time"
    )
    max_tokens: int = _setting(
        32768, "reply budget of a request that names none; cut to the window, never refused", low=1, high=1048576
    )
    thinking: bool = _setting(True, "think before answering unless the request says otherwise")
    body_mib: int = _setting(
        16,
        "largest request body in MiB; a million tokens of text are about 5, and tokenising needs some 100 bytes a byte",
        low=1,
        high=4096,
    )
    keepalive_s: float = _setting(
        15.0, "a silent stream gets an SSE comment this often; 0 turns it off", low=0, high=3600
    )
    drain_s: float = _setting(20.0, "seconds running replies get to finish after SIGTERM", low=0, high=3600)
    seed_salt: str = _setting("", "mixed into the seed of requests that send none (same prompt, same salt, same reply)")
    floor_gib: float = _setting(
        0.5, "memory in GiB that must stay free by plan; less is refused before loading", low=0, high=64, commands=_BOTH
    )
    overhead_gib: float = _setting(
        0.5,
        "memory in GiB that interpreter, libraries and allocator take beside what the plan counts",
        low=0,
        high=64,
        commands=_BOTH,
    )
    kept_gib: float = _setting(
        1.0,
        "memory in GiB for states of prompts and replies, so that what begins alike is not read again",
        low=0,
        high=1024,
        commands=_BOTH,
    )
    disk_cache: str = _setting(
        "", "folder on a fast local disk in which prompt states outlive a restart; empty keeps none", commands=_BOTH
    )
    disk_cache_gib: float = _setting(64.0, "largest size in GiB of the disk cache of each rank", low=0, high=65536)
    disk_keep_free_gib: float = _setting(
        -1.0,
        "space in GiB that the disk cache leaves free on its disk; with less free it stores nothing; -1 takes a tenth "
        "of the disk, at most 100",
        low=0,
        high=65536,
        also=-1,
    )
    guard_gib: float = _setting(
        0.25,
        "the server drains and stops when less than this many GiB stay available; 0 never",
        low=0,
        high=64,
        commands=_BOTH,
    )
    ranks: int = _setting(
        1,
        "ranks that share one model; serve starts those besides its own on this machine",
        low=1,
        high=8,
        commands=_BOTH,
    )
    rank: int = _setting(0, "which rank this process is; 0 schedules and serves", low=0, high=7, commands=("engine",))
    leader: str = _setting(
        "", "HOST:PORT at which rank 0 waits for the others; the network must be trusted", commands=("engine",)
    )
    wire: str = _setting(
        "auto",
        "what tensors travel through between ranks; auto is nccl where each has a GPU of its own, else shared memory "
        "on one machine and gloo between machines",
        choices=("auto", "shared", "gloo", "nccl"),
    )
    rank_join_s: float = _setting(300.0, "seconds within which all ranks must have joined", low=1, high=86400)
    rank_load_s: float = _setting(3600.0, "seconds within which all ranks must have loaded", low=1, high=86400)
    rank_lost_s: float = _setting(
        5.0, "seconds without a sign of life after which a rank is lost and all end", low=2, high=600
    )
    rank_step_s: float = _setting(
        300.0, "seconds within which a rank that is alive must have done its part of a forward", low=1, high=86400
    )
    cp: bool = _setting(
        False, "context parallel: each rank caches every ranks-th token, so that windows grow", commands=_BOTH
    )
    dense: str = _setting(
        "bf16",
        "format of linear layers outside the routed experts on a GPU",
        choices=DENSE_FORMATS,
        commands=_BOTH,
    )
    head: str = _setting("bf16", "format of lm_head on a GPU", choices=DENSE_FORMATS, commands=_BOTH)
    graphs_gib: float = _setting(
        0.0,
        "memory in GiB of captured decode windows on a GPU; serve counts them itself",
        low=0,
        high=64,
        commands=_PLAN,
    )
    available_gib: float = _setting(
        0.0, "memory in GiB that every rank has; 0 takes what this machine has now", low=0, high=4096, commands=_PLAN
    )
    log_level: str = _setting("info", "what is logged", choices=("debug", "info", "warning", "error"))

    @classmethod
    def from_sources(
        cls,
        flags: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        defaults: Mapping[str, object] | None = None,
    ) -> Settings:
        """Settings from flags (None values are "not given") over environment over defaults; `defaults` replace some of
        the settings' own.

        Raises ConfigError naming the setting, where its value came from, the value and the range.
        """
        env = os.environ if environ is None else environ
        _refuse_unknown(cls, env)
        values: dict[str, Any] = dict(defaults or {})
        for f in dataclasses.fields(cls):
            flag = (flags or {}).get(f.name)
            variable = env_name(f.name)
            if flag is not None:
                values[f.name] = _parse(f, flag, flag_name(f.name))
            elif env.get(variable, "") != "":
                values[f.name] = _parse(f, env[variable], variable)
        return cls(**values)


def _refuse_unknown(settings: type[Settings], env: Mapping[str, str]) -> None:
    """A misspelt variable would otherwise do nothing without a word."""
    known = {env_name(f.name) for f in dataclasses.fields(settings)}
    for name in sorted(env):
        if name.startswith(ENV_PREFIX) and name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{name} is in the environment, but there is no such setting{hint}")


def flags(command: str) -> list[dataclasses.Field[Any]]:
    """The settings that a command takes; `engine` serves, too."""
    names = {command, "serve"} if command == "engine" else {command}
    return [f for f in dataclasses.fields(Settings) if names & set(f.metadata["commands"])]


def help_text(f: dataclasses.Field[Any]) -> str:
    """One setting in a line, for --help."""
    default = int(f.default) if isinstance(f.default, bool) else f.default
    shown = f"default {default}; " if default != "" else ""
    return f"{f.metadata['reason']} ({range_text(f)}; {shown}{env_name(f.name)})".replace("%", "%%")


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def env_name(name: str) -> str:
    return ENV_PREFIX + name.upper()


def range_text(f: dataclasses.Field[Any]) -> str:
    """The accepted values of one setting in words, for messages and tables."""
    meta = f.metadata
    if meta["choices"]:
        return ", ".join(meta["choices"])
    if isinstance(f.default, bool):
        return "0, 1"
    if meta["low"] is not None:
        also = "" if meta["also"] is None else f"{meta['also']} or "
        return f"{also}{meta['low']} to {meta['high']}"
    return "text"


def _parse(f: dataclasses.Field[Any], raw: object, source: str) -> Any:
    meta = f.metadata

    def refuse() -> ConfigError:
        return ConfigError(f"{source} is {raw!r}; it takes {range_text(f)} (default {f.default!r})")

    kind: Any = type(f.default)
    if kind is bool:
        words = {
            "1": True,
            "true": True,
            "yes": True,
            "on": True,
            "0": False,
            "false": False,
            "no": False,
            "off": False,
        }
        word = str(raw).strip().lower()
        if word not in words:
            raise refuse()
        return words[word]
    try:
        value = kind(raw)
    except (TypeError, ValueError):
        raise refuse() from None
    if meta["choices"] and value not in meta["choices"]:
        raise refuse()
    if kind is float and not math.isfinite(value):
        raise refuse()
    if meta["low"] is not None and not meta["low"] <= value <= meta["high"] and value != meta["also"]:
        raise refuse()
    return value


def table() -> str:
    """The settings as a Markdown table (the README's, kept in step by a test)."""
    rows = ["| flag | environment | default | values | of | why |", "|---|---|---|---|---|---|"]
    for f in dataclasses.fields(Settings):
        default = "" if f.default == "" else str(int(f.default) if isinstance(f.default, bool) else f.default)
        commands = ", ".join(f.metadata["commands"])
        rows.append(
            f"| `{flag_name(f.name)}` | `{env_name(f.name)}` | {default} | {range_text(f)} | {commands} | "
            f"{f.metadata['reason']} |"
        )
    return "\n".join(rows)
