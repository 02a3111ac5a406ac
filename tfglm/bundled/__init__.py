"""The models that come with tfglm: a tiny GLM-5.3 that was really trained, and a drafter for it (see README.md)."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = FOLDER / "glm-5.3-tiny"
"""What `tfglm serve` serves when it is given no path."""
DRAFTER = FOLDER / "glm-5.3-tiny-dspark"
