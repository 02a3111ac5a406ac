"""A drafter that falls over in one rank's process, or in all: the server goes on, and its replies are as before."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from processes import ServerProcess
from test_serve_ranks import SERVE, SMALL, TEXT, complete, health, on_cpu, serving

FALLING = """
import os

os.environ.setdefault("GOMP_SPINCOUNT", "3000")
from tfglm.ops.steps import Steps

own = Steps.sum

def fall(self, partial):
    if self._met == 1 and str(self.rank) in os.environ["FALLS_ON"] and os.path.exists(os.environ["FALLS_WHEN"]):
        raise RuntimeError("it fell over")
    return own(self, partial)

Steps.sum = fall
"""


@on_cpu
def test_a_drafter_that_falls_over_at_once_leaves_no_pages_behind(checkpoint: Path, tmp_path: Path) -> None:
    """They would lack its rows, which a drafter of the next start would take for its own."""
    (tmp_path / "sitecustomize.py").write_text(FALLING)
    now, cache = tmp_path / "now", tmp_path / "cache"
    now.touch()
    how: dict[str, Any] = {"environ": {"FALLS_ON": "0", "FALLS_WHEN": str(now)}, "patches": tmp_path}
    flags = (*SMALL, "--kept-gib", "0.1", "--disk-cache", str(cache), "--disk-keep-free-gib", "0")
    pages = []
    for _ in range(2):
        with ServerProcess(*SERVE, checkpoint, "--drafter", "mtp", *flags, **how) as server:
            complete(serving(server), prompt=TEXT[:2000], max_tokens=4)
            server.send(signal.SIGTERM)
            assert server.ended() == 0, server.lines
        pages.append(len(list(cache.glob("*/*.page"))))
        assert any("W_DISK_CACHE: no further states" in line for line in server.lines) == now.exists(), server.lines
        now.unlink(missing_ok=True)
    assert pages[0] == 0 < pages[1]


@on_cpu
@pytest.mark.parametrize("ranks", ["1", "012"])
def test_a_drafter_that_falls_over(ranks: str, checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(FALLING)
    now = tmp_path / "now"
    how: dict[str, Any] = {"environ": {"FALLS_ON": ranks, "FALLS_WHEN": str(now)}, "patches": tmp_path}
    common: dict[str, Any] = {"prompt": TEXT[:200], "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    samplings = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 5}]
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", "--drafter", "mtp", *SMALL, **how) as server:
        url = serving(server)
        before = [complete(url, **common, **sampling).choices[0].text for sampling in samplings]
        assert not any("W_DRAFTER" in line for line in server.lines)
        now.touch()
        after = [complete(url, **common, **sampling).choices[0].text for sampling in samplings]
        assert health(url)["ranks"] == ["ready"] * 3
        server.send(signal.SIGTERM)
        assert server.ended() == 0, server.lines
    assert after == before
    told = [line for line in server.lines if "W_DRAFTER" in line]
    assert [line for line in told if "drafting is off" in line] == [
        line for line in told if not line.startswith("rank")
    ]
    assert len(told) == len({"0", *ranks}), told
