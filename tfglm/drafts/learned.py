"""What was learned of a drafter's confidences, from one start of a server to the next.

One small file for all models and drafters. It decides how many drafts are verified, never a token, and on several ranks
only rank 0 reads and writes it: the others are told which rows to verify.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfglm.drafts.calibration import Calibration

log = logging.getLogger(__name__)

FILE = "calibration.json"
_ENTRIES = 32
"""Models and drafters that are remembered, those that ran last."""


class Learned:
    """The calibration of one drafter beside one checkpoint, in a folder. A file that cannot be read or written, or that
    holds something else, costs what was learned and nothing more."""

    def __init__(self, folder: Path, key: str) -> None:
        self._path = folder / FILE
        self._key = key

    def load(self) -> Calibration:
        found = self._read().get(self._key)
        if found is None:
            return Calibration()
        try:
            return Calibration.from_facts(found)
        except (ValueError, TypeError, OverflowError) as error:
            log.warning("W_CALIBRATION: %s holds no calibration (%s); it is learned anew", self._path, error)
            return Calibration()

    def save(self, calibration: Calibration) -> None:
        """Whole or not at all."""
        others = {key: value for key, value in self._read().items() if key != self._key}
        kept = dict([*others.items(), (self._key, calibration.facts())][-_ENTRIES:])
        temporary = self._path.with_name(f".{FILE}.{os.getpid()}")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(kept))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("W_CALIBRATION: %s cannot be written, so the next start learns anew: %s", self._path, error)

    def _read(self) -> Mapping[str, Any]:
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            log.warning("W_CALIBRATION: %s cannot be read, so what was learned is forgotten: %s", self._path, error)
            return {}
        return found if isinstance(found, dict) else {}
