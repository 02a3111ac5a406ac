"""Whether a cluster that was told to start serves, or why it will not; and whether what it says has sense."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_EVERY_S = 1.0
_ASK_S = 5.0
_MOST_OF_ONE = 0.5
"""A share of one character in a reply that no text has, and that a model with wrong weights easily has."""


def wait(
    rank: int,
    url: str,
    seconds: float,
    peer_seconds: float,
    *,
    sysroot: Path = Path("/"),
    unit_state: Callable[[int], str] | None = None,
    health: Callable[[str], int] | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> str:
    """Wait until rank 0's /health at `url` answers 200. Returns "" then, else what is in the way, as soon as waiting is
    known to be of no use: this unit has failed, another rank has given up, or was not heard of for `peer_seconds`."""
    unit_state, health = unit_state or _unit_state, health or _status
    began = time.monotonic()
    while True:
        if health(url) == 200:
            return ""
        waited = time.monotonic() - began
        ranks = _ranks(sysroot, rank)
        if unit_state(rank) == "failed":
            own = next((r for r in ranks if r["rank"] == rank), {})
            return f"E_RANKS: tfglm@{rank} has given up{_because(own)}; see `journalctl -u tfglm@{rank}`"
        for other in ranks:
            if other["phase"] == "gone" and other.get("code"):
                return f"{other['code']}: rank {other['rank']} on {other['name']} has given up{_because(other)}"
            if other["phase"] == "unknown" and waited >= peer_seconds:
                return (
                    f"E_RANKS: rank {other['rank']} on {other['name']} ({other['control']}) was not heard of for "
                    f"{waited:.0f} s; see `systemctl status tfglm@{other['rank']}` there"
                )
        if waited >= seconds:
            phases = (
                ", ".join(f"rank {r['rank']} {r['phase']}{_because(r)}" for r in ranks) or "no rank has said a word"
            )
            return f"E_RANKS: {url} did not answer within {seconds:.0f} s; {phases}"
        sleep(_EVERY_S)


def _because(rank: Mapping[str, Any]) -> str:
    return f" ({rank['reason']})" if rank.get("reason") else ""


def _ranks(sysroot: Path, rank: int) -> list[dict[str, Any]]:
    try:
        state = json.loads((sysroot / f"run/tfglm/rank{rank}.json").read_text())
    except (OSError, ValueError):
        return []
    return list(state.get("ranks", []))


def _unit_state(rank: int) -> str:
    command = ["systemctl", "show", "--property=ActiveState", "--value", f"tfglm@{rank}.service"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()


def _status(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=_ASK_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def nonsense(reply: str, expected: str) -> str:
    """Why a reply is not one of a sound model, "" if it may be. A collapsed model answers "!!!!", which is not empty.
    expected: a regular expression that it must contain, "" for none."""
    text = "".join(reply.split())
    if not text:
        return "it is empty"
    most, count = Counter(text).most_common(1)[0]
    if len(text) >= 8 and count > _MOST_OF_ONE * len(text):
        return f"{count} of its {len(text)} characters are {most!r}"
    if expected and not re.search(expected, reply):
        return f"it has nothing of {expected!r}"
    return ""
