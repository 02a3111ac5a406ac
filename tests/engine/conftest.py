"""Tests of the engine over ranks use the threads that stand for ranks in tests/ranks."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
