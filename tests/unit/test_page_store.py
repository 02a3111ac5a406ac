"""Pages in files: what was written is read, and nothing else is, whatever happened to the files or to the writer."""

import hashlib
import logging
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfglm.cache.disk import HEADER_BYTES, PageStore
from tfglm.cache.leftovers import other_folders, rank_folder
from tfglm.errors import ConfigError

PAYLOAD = 1000
FILE = HEADER_BYTES + PAYLOAD
WHO = hashlib.sha256(b"this model").digest()
ROOT = bytes(32)


def key(number: int, text: int = 0) -> bytes:
    return hashlib.sha256(f"{text}/{number}".encode()).digest()


def page(number: int, text: int = 0) -> bytes:
    return random.Random(f"{text}/{number}").randbytes(PAYLOAD)


def store_in(folder: Path, *, limit: int = 1 << 30, keep_free: int = 0, who: bytes = WHO) -> PageStore:
    return PageStore(folder, who, PAYLOAD, limit=limit, keep_free=keep_free)


def write_text(store: PageStore, pages: int, text: int = 0) -> None:
    for number in range(pages):
        assert store.write(key(number, text), key(number - 1, text) if number else ROOT, page(number, text))


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.page"), key=lambda file: file.stat().st_mtime_ns)


def test_pages_outlive_the_store(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write_text(store, 3)
    store.close()
    again = store_in(tmp_path)
    assert [again.read(key(number)) for number in range(4)] == [page(0), page(1), page(2), None]
    assert again.used == 3 * FILE == sum(file.stat().st_size for file in files(tmp_path))


def test_a_page_is_written_once(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write_text(store, 1)
    before = files(tmp_path)[0].stat().st_mtime_ns
    write_text(store, 1)
    assert files(tmp_path)[0].stat().st_mtime_ns == before and store.used == FILE


@pytest.mark.parametrize("seed", range(60))
def test_any_damaged_byte_is_noticed(seed: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    write_text(store, 2)
    file = next(file for file in files(tmp_path) if file.name.startswith(key(1).hex()))
    data, dice = bytearray(file.read_bytes()), random.Random(seed)
    at = seed if seed < 40 else dice.randrange(len(data))  # the header's bytes first
    data[at] ^= 1 << dice.randrange(8)
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert store.read(key(1)) is None
    assert caplog.text.count("W_DISK_CACHE") == 1 and str(file) in caplog.text
    assert key(1) not in store and store.read(key(0)) == page(0)
    assert store.write(key(1), key(0), page(1)) and store.read(key(1)) == page(1)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, FILE - 1, FILE + 1])
def test_a_file_of_another_length_is_noticed(length: int, tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write_text(store, 1)
    [file] = files(tmp_path)
    file.write_bytes((file.read_bytes() + b"more")[:length])
    store.close()
    assert store_in(tmp_path).read(key(0)) is None


def test_a_page_of_another_text_or_model_is_never_served(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path)
    write_text(store, 2)
    older, newer = files(tmp_path)
    newer.write_bytes(older.read_bytes())
    assert store.read(key(1)) is None
    store.close()
    assert store_in(tmp_path, who=bytes(32)).read(key(0)) is None
    assert caplog.text.count("another text or model") == 2


def test_foreign_files_are_left_alone_and_unfinished_ones_removed(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    write_text(store, 1)
    store.close()
    (tmp_path / "notes.txt").write_text("mine")
    unfinished = tmp_path / f"{key(7).hex()}-{key(6)[:16].hex()}.page.tmp"
    unfinished.write_bytes(b"half")
    again = store_in(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine" and not unfinished.exists()
    assert again.used == FILE


def test_one_process_at_a_time(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    with pytest.raises(ConfigError, match="another server uses"):
        store_in(tmp_path)
    store.close()
    store_in(tmp_path).close()


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--disk-cache"):
        store_in(tmp_path / "file" / "folder")


def held(store: PageStore, text: int, pages: int = 4) -> list[int]:
    return [number for number in range(pages) if key(number, text) in store]


def test_the_limit_holds_and_the_oldest_end_goes_first(tmp_path: Path) -> None:
    store = store_in(tmp_path, limit=5 * FILE + 10)
    write_text(store, 3, text=1)
    write_text(store, 2, text=2)
    store.touch([key(number, 1) for number in range(3)])
    write_text(store, 1, text=3)
    assert (held(store, 1), held(store, 2), held(store, 3)) == ([0, 1, 2], [0], [0])
    assert store.used == 5 * FILE == sum(file.stat().st_size for file in files(tmp_path))
    store.close()
    # What was used last is remembered across a restart, whatever the order of writing.
    again = store_in(tmp_path, limit=5 * FILE)
    write_text(again, 2, text=4)
    assert (held(again, 1), held(again, 2), held(again, 3), held(again, 4)) == ([0, 1], [], [0], [0, 1])


def test_a_text_longer_than_the_limit_keeps_its_beginning(tmp_path: Path) -> None:
    store = store_in(tmp_path, limit=3 * FILE)
    for number in range(6):
        store.write(key(number), key(number - 1) if number else ROOT, page(number))
    assert store.used <= 3 * FILE and key(0) in store


def test_space_is_left_on_the_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = store_in(tmp_path, keep_free=1 << 60)
    assert not store.write(key(0), ROOT, page(0)) and not store.write(key(1), key(0), page(1))
    assert caplog.text.count("must stay so") == 1 and not files(tmp_path)


def test_what_would_not_make_room_is_not_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Neither the pages that are there nor those that other ranks left: without them there would be as little room."""
    own, left = rank_folder(tmp_path, 0, 1), rank_folder(tmp_path, 0, 3)
    for folder in (own, left):
        store = store_in(folder)
        write_text(store, 3)
        store.close()
    for limits in ({"limit": 1 << 30, "keep_free": 1 << 60}, {"limit": FILE - 1, "keep_free": 0}):
        store = PageStore(own, WHO, PAYLOAD, beside=other_folders(tmp_path, 1), **limits)
        assert not store.takes_more
        assert not store.write(key(0, 1), ROOT, page(0, 1)) and not store.write(key(3), key(2), page(3))
        assert [store.read(key(number)) for number in range(3)] == [page(0), page(1), page(2)]
        store.close()
        assert len(files(own)) == len(files(left)) == 3
    assert caplog.text.count("must stay so by --disk-keep-free-gib") == 2


def test_pages_go_where_that_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path, keep_free=3 * FILE)
    monkeypatch.setattr(store, "_free", lambda: 5 * FILE - store.used)
    write_text(store, 2)
    assert store.takes_more and store.write(key(0, 1), ROOT, page(0, 1))
    assert (held(store, 0), held(store, 1)) == ([0], [0])


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)

    def full(fd: int) -> None:
        assert not files(tmp_path), "the page had its name before it was on the disk"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        store.write(key(0), ROOT, page(0))
    assert [file.name for file in tmp_path.iterdir()] == ["lock"] and key(0) not in store


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_page_store import ROOT, key, page, store_in
store, number = store_in(Path(sys.argv[1])), int(sys.argv[3])
while True:
    store.write(key(number), key(number - 1) if number else ROOT, page(number))
    print(number, flush=True)
    number += 1
"""


def test_kill_9_at_any_moment_loses_at_most_the_page_being_written(tmp_path: Path) -> None:
    """Whatever the writer said was written is there, whole; the next start goes on from it."""
    done, dice = -1, random.Random(1)
    for _ in range(8):
        command = [sys.executable, "-c", WRITER, tmp_path, Path(__file__).parent, str(done + 1)]
        writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert writer.stdout is not None
        done = int(writer.stdout.readline())
        time.sleep(dice.random() * 0.05)
        writer.send_signal(signal.SIGKILL)
        said = writer.stdout.read().split("\n")
        writer.wait(30)
        done = max([done, *(int(line) for line in said[:-1])])
        store = store_in(tmp_path)
        assert all(store.read(key(number)) == page(number) for number in range(done + 1))
        if key(done + 1) in store:  # written, and killed before it said so
            assert store.read(key(done + 1)) == page(done + 1)
        assert key(done + 2) not in store and not list(tmp_path.glob("*.tmp"))
        store.close()
    assert done >= 7


def test_what_ranks_of_another_number_left_counts_and_goes_first(tmp_path: Path) -> None:
    """Nobody reads it any more: it would stay for ever."""
    for rank in range(3):
        old = store_in(rank_folder(tmp_path, rank, 3))
        write_text(old, 2, rank)
        old.close()
    (rank_folder(tmp_path, 0, 3) / "note.txt").write_text("of somebody else")
    used = store_in(rank_folder(tmp_path, 0, 4))  # by a server that runs beside this one
    write_text(used, 1)
    own = rank_folder(tmp_path, 1, 2)
    store = PageStore(own, WHO, PAYLOAD, limit=8 * FILE, keep_free=0, beside=other_folders(tmp_path, 2))
    left = []
    for number in range(10):
        store.write(key(number, 9), key(number - 1, 9) if number else ROOT, page(number, 9))
        left.append(sum(file.stat().st_size for file in tmp_path.glob("rank?of[23]/*.page")))
    assert left == [7 * FILE, *[8 * FILE] * 9] and not list(tmp_path.glob("rank?of3/*.page"))
    assert len(files(own)) == 8 and len(files(rank_folder(tmp_path, 0, 4))) == 1
    assert (rank_folder(tmp_path, 0, 3) / "note.txt").exists()
    used.close()


def test_leftovers_of_a_server_that_has_come_since_are_its_own(tmp_path: Path) -> None:
    parent = tmp_path / "disk"
    old = store_in(rank_folder(parent, 0, 3))
    write_text(old, 2)
    old.close()
    beside = other_folders(parent, 2)
    store = PageStore(rank_folder(parent, 0, 2), WHO, PAYLOAD, limit=2 * FILE, keep_free=0, beside=beside)
    back = store_in(rank_folder(parent, 0, 3))
    assert all(store.write(key(number, 9), ROOT, page(number, 9)) for number in range(3))
    assert len(files(rank_folder(parent, 0, 3))) == 2 and len(files(rank_folder(parent, 0, 2))) == 2
    back.close()


def test_a_disk_without_a_folder_has_no_leftovers(tmp_path: Path) -> None:
    assert other_folders(tmp_path / "none", 1) == []
    (tmp_path / "rank0of2").write_text("no folder")
    assert other_folders(tmp_path, 1) == []
