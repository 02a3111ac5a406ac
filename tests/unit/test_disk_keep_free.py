"""How much of its disk the prompt cache leaves alone."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tfglm.engine.keep import GIB, keep_free
from tfglm.settings import Settings


@pytest.mark.parametrize(("disk_gib", "kept_gib"), [(250, 25), (8000, 100)])
def test_a_tenth_of_the_disk_but_no_more_than_100_gib(
    disk_gib: int, kept_gib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def usage(path: Path) -> Any:
        asked.append(path)
        return type("Usage", (), {"total": disk_gib * GIB})

    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert keep_free(Settings(disk_cache=str(tmp_path / "not/there/yet"))) == kept_gib * GIB
    assert asked == [tmp_path]


@pytest.mark.parametrize("gib", [0.0, 5.0])
def test_what_is_given_holds(gib: float, tmp_path: Path) -> None:
    assert keep_free(Settings(disk_cache=str(tmp_path), disk_keep_free_gib=gib)) == gib * GIB
