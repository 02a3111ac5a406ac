"""The file in which a supervisor says how its rank and its peers are, for `tfglm status` and for people."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

STATE_DIR = Path("/run/tfglm")


class StateFile:
    """Written under another name and renamed, so that a reader never sees half of it. A disk that is full costs one
    warning, not the rank: the state is also in every heartbeat."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed = False

    def write(self, state: Mapping[str, Any]) -> None:
        new = self.path.with_name(self.path.name + ".new")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new.write_text(json.dumps(state, indent=1) + "\n")
            new.replace(self.path)
        except OSError as error:
            if not self._failed:
                log.warning(
                    "W_STATE: %s cannot be written (%s); tfglm status will be out of date", self.path, error.strerror
                )
            self._failed = True
            return
        if self._failed:
            log.info("%s can be written again", self.path)
        self._failed = False


def state_path(rank: int, directory: Path | None = None) -> Path:
    """Where rank `rank` of this node writes. systemd names the directory in $RUNTIME_DIRECTORY."""
    named = os.environ.get("RUNTIME_DIRECTORY", "").split(":")[0]
    return (directory or (Path(named) if named else STATE_DIR)) / f"rank{rank}.json"


def read_states(directory: Path | None = None) -> list[dict[str, Any]]:
    """All states of this node, by rank; half-written or foreign files are left out."""
    states = []
    for path in sorted((directory or STATE_DIR).glob("rank*.json")):
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(state, dict) and "phase" in state:
            states.append(state)
    return states
