"""The window of a start is the window of the next, for as long as it fits."""

import json
import logging
from pathlib import Path

import pytest

from tfglm.cache.pages import PAGE
from tfglm.memory.window import settle_window, window_key


def test_the_first_window_is_kept_while_free_memory_drifts(tmp_path: Path) -> None:
    first = settle_window("a", 100 * PAGE, 1 << 20, tmp_path)
    assert first == 97 * PAGE
    for largest in (98, 100, 97, 120):
        assert settle_window("a", largest * PAGE, 1 << 20, tmp_path) == first
    assert settle_window("b", 200 * PAGE, 1 << 20, tmp_path) == 194 * PAGE


def test_a_window_that_no_longer_fits_shrinks_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settle_window("a", 100 * PAGE, 1 << 20, tmp_path)
    with caplog.at_level(logging.WARNING):
        assert settle_window("a", 50 * PAGE, 1 << 20, tmp_path) == 48 * PAGE
    assert "no longer fits" in caplog.text
    assert settle_window("a", 100 * PAGE, 1 << 20, tmp_path) == 48 * PAGE


def test_limits(tmp_path: Path) -> None:
    assert settle_window("small", 1000 * PAGE, 8192, tmp_path) == 8192
    assert settle_window("page", PAGE, 1 << 20, tmp_path) == PAGE
    assert settle_window("less", PAGE // 2, 1 << 20, tmp_path) == PAGE // 2
    assert settle_window("none", 0, 1 << 20, tmp_path) == 0
    assert "none" not in json.loads((tmp_path / "windows.json").read_text())
    settle_window("small", 1000 * PAGE, 1 << 20, tmp_path)
    assert settle_window("small", 1000 * PAGE, 4096, tmp_path) == 4096


@pytest.mark.parametrize("content", ["{", "[]", '{"a": -1}', '{"a": "many"}', '{"a": true}', "\x00"])
def test_a_broken_file_is_forgotten(content: str, tmp_path: Path) -> None:
    (tmp_path / "windows.json").write_text(content)
    assert settle_window("a", 100 * PAGE, 1 << 20, tmp_path) == 97 * PAGE
    assert json.loads((tmp_path / "windows.json").read_text()) == {"a": 97 * PAGE}


def test_a_folder_that_cannot_be_written_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    assert settle_window("a", 100 * PAGE, 1 << 20, tmp_path / "file") == 97 * PAGE
    assert "cannot be written" in caplog.text


def test_only_the_newest_windows_are_kept(tmp_path: Path) -> None:
    for number in range(70):
        settle_window(str(number), 10 * PAGE, 1 << 20, tmp_path)
    kept = json.loads((tmp_path / "windows.json").read_text())
    assert len(kept) == 64 and "69" in kept and "0" not in kept


def test_a_key_names_every_fact() -> None:
    assert window_key({"a": 1, "b": "x"}) == window_key({"b": "x", "a": 1})
    assert window_key({"a": 1}) != window_key({"a": 2})
