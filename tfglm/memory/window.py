"""The window of a server that was told none: the largest that fits, and then the same one again at every start.

What is free differs by some hundred MiB from start to start, and with it the largest window. A client that has learnt
a window should find it again, so the first one is kept, with a margin, for as long as settings, model and machine are
the same and it still fits.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfglm.cache.pages import PAGE

log = logging.getLogger(__name__)

MARGIN = 0.97
"""Of the largest window, what is taken: 3 % of an engine's caches are about what free memory drifts by."""
_ENTRIES = 64


def state_folder() -> Path:
    """Where windows are kept: XDG_STATE_HOME/tfglm, which is ~/.local/state/tfglm where it is not set."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tfglm"


def window_key(facts: Mapping[str, Any]) -> str:
    """One name for everything that a window depends on: settings, checkpoint, machine. facts: as JSON holds them."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def settle_window(key: str, largest: int, limit: int, folder: Path | None = None) -> int:
    """The window for `key` where up to `largest` tokens fit on the tightest rank and at most `limit` are wanted.

    The kept one if it still fits; otherwise limit, or where that does not fit MARGIN of the largest in whole pages,
    which is then kept. A folder that cannot be read or written costs the memory of windows, nothing else. With
    `largest` 0, where nothing fits, the answer is 0 and what is kept stays.
    """
    path = (folder or state_folder()) / "windows.json"
    kept = _read(path)
    known = kept.get(key, 0)
    if 0 < known <= min(largest, limit):
        return known
    if largest <= 0:
        return 0
    window = limit if largest >= limit else max(int(largest * MARGIN) // PAGE * PAGE, min(largest, PAGE))
    if known:
        log.warning("W_WINDOW: the window of %d tokens of earlier starts no longer fits; it is %d now", known, window)
    _write(path, {**{k: v for k, v in kept.items() if k != key}, key: window})
    return window


def _read(path: Path) -> dict[str, int]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("W_WINDOW: %s cannot be read, so that windows of earlier starts are forgotten: %s", path, error)
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {key: window for key, window in entries if type(window) is int and window > 0}


def _write(path: Path, windows: Mapping[str, int]) -> None:
    """Whole or not at all; the newest entries only."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    newest = dict(list(windows.items())[-_ENTRIES:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(newest, indent=1))
        temporary.replace(path)
    except OSError as error:
        log.warning("W_WINDOW: %s cannot be written, so that the next start may find another window: %s", path, error)
