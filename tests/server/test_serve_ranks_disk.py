"""Prompt states of several ranks on their disks: resumed after a restart, and when one disk is full."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from processes import ServerProcess
from test_serve_ranks import SERVE, TEXT, complete, on_cpu, serving


@on_cpu
@pytest.mark.parametrize("cp", ["0", "1"])
def test_three_ranks_draft_and_resume_after_a_restart(cp: str, checkpoint: Path, tmp_path: Path) -> None:
    """MTP and copies over ranks, and a disk of every rank: drafted, serial and resumed replies are one reply."""
    flags = ("--ranks", "3", "--cp", cp, "--port", "0", "--threads", "1", "--context", "4096", "--parallel", "2")
    disk = ("--disk-cache", str(tmp_path), "--disk-keep-free-gib", "0", "--kept-gib", "0.05")
    wanted: dict[str, Any] = {"prompt": TEXT, "max_tokens": 24, "seed": 5, "temperature": 1.0}
    replies = []
    for draft in (True, False):
        with ServerProcess(*SERVE, str(checkpoint), *flags, *disk) as server:
            url = serving(server)
            replies.append(complete(url, **wanted, extra_body={"draft": draft, "ignore_eos": True}))
    assert replies[0].choices[0].text == replies[1].choices[0].text
    pages = [len(list((tmp_path / f"rank{rank}of3").glob("*.page"))) for rank in range(3)]
    assert pages[0] > 0 and pages == [pages[0]] * 3
    assert replies[0].usage.prompt_tokens_details.cached_tokens == 0
    whole = 256 * (3 if cp == "1" else 1)
    assert replies[1].usage.prompt_tokens_details.cached_tokens >= whole


FULL_DISK = """
import errno, os
if os.environ.get("TFGLM_RANK") == "1":
    from tfglm.cache import disk
    write_all, headers = disk._write_all, []

    def fill(file, data):
        headers.append(len(data) == disk.HEADER_BYTES)
        if sum(headers) > 3:
            file.write(data[:50])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_all(file, data)

    disk._write_all = fill
"""


@on_cpu
def test_a_disk_that_fills_up_on_one_rank(checkpoint: Path, tmp_path: Path) -> None:
    """Replies go on; after a restart the prompt resumes from the three pages that both ranks have."""
    (tmp_path / "sitecustomize.py").write_text(FULL_DISK)
    flags = ("--ranks", "2", "--port", "0", "--threads", "1", "--context", "4096", "--parallel", "1", "--copy", "0")
    disk = ("--disk-cache", str(tmp_path / "disk"), "--disk-keep-free-gib", "0", "--kept-gib", "0.05")
    wanted: dict[str, Any] = {"prompt": TEXT, "max_tokens": 16, "seed": 5, "temperature": 1.0}
    replies = []
    for patches in (tmp_path, None):
        with ServerProcess(*SERVE, str(checkpoint), *flags, *disk, patches=patches) as server:
            url = serving(server)
            replies += [complete(url, **wanted, extra_body={"ignore_eos": True}) for _ in range(2)]
            server.send(signal.SIGTERM)
            assert server.ended(60) == 0, server.lines
        told = [line for line in server.lines if "W_DISK_CACHE" in line]
        assert len(told) == (1 if patches else 0) and all(
            "rank 1: " in line and "No space left" in line for line in told
        )
    assert len({reply.choices[0].text for reply in replies}) == 1
    pages = [list((tmp_path / "disk" / f"rank{rank}of2").iterdir()) for rank in range(2)]
    assert all(file.suffix in (".page", "") for folder in pages for file in folder), pages
    assert len(pages[0]) == len(pages[1]) > 4  # the second server has written what was missing
    cached = [reply.usage.prompt_tokens_details.cached_tokens for reply in replies]
    assert cached[0] == 0 and cached[1] > cached[2] == 3 * 256 and cached[3] == cached[1]
