"""Prompt states on a disk under the engine: the same replies after a restart, whatever became of the files."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import LIMIT, TOKENIZER, Receiver, ask, request
from paged_model import PagedModel

from tfglm.cache.disk import AHEAD, PageStore
from tfglm.cache.kept import KeptStates
from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE
from tfglm.cache.tier import DiskTier, Fetch, PageLateError, Pages, Readers
from tfglm.engine.engine import Engine
from tfglm.engine.states import PromptStates
from tfglm.settings import Settings

WHO = b"w" * 32


class Served:
    """An engine over a paged model whose kept pages also go to a folder."""

    def __init__(self, folder: Path, *, pages: int = 16, budget: int = 8, **settings: int) -> None:
        self.model = PagedModel(pages)
        # The model's memory is the one plane there is; the others are of no width.
        memory = torch.from_numpy(self.model.memory)[:, :, None]
        empty = torch.empty(pages, PAGE, 0, dtype=torch.int64)
        planes = Pages([LayerPlanes(memory, empty, None)])
        self.kept = KeptStates(self.model.pool, budget, WHO)
        self.store = PageStore(folder, WHO, planes.nbytes, limit=1 << 30, keep_free=0)
        states = PromptStates(self.kept, DiskTier(self.kept, planes, self.store))
        self.engine = Engine(self.model, TOKENIZER, Settings(**settings), (), None, states)
        self.engine.start()

    def reply(self, tokens: list[int], **fields: object) -> Receiver:
        receiver = ask(self.engine, request("a", tokens, 6, seed=4, logprobs=1, **fields))
        assert receiver.finished
        return receiver


@contextmanager
def served(folder: Path, **options: int) -> Iterator[Served]:
    running = Served(folder, **options)
    try:
        yield running
        assert running.engine.wait_idle(LIMIT)
    finally:
        assert running.engine.stop(LIMIT)


def prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(300) for _ in range(length)]


def outcome(receiver: Receiver) -> tuple[object, ...]:
    *rest, usage = receiver.outcome()
    return *rest, replace(usage, cached_tokens=0)


def cached(receiver: Receiver) -> int:
    return receiver.finished.usage.cached_tokens


@pytest.mark.parametrize("length", [PAGE, PAGE + 1, 3 * PAGE - 1, 3 * PAGE, 3 * PAGE + 1])
def test_a_prompt_resumes_after_a_restart_at_page_edges(length: int, tmp_path: Path) -> None:
    with served(tmp_path) as before:
        first = before.reply(prompt(length))
        assert cached(first) == 0
    with served(tmp_path) as after:
        again = after.reply(prompt(length))
        whole = (length - 1) // PAGE * PAGE
        assert cached(again) == whole
        assert sum(tokens for window in after.model.windows for tokens, _ in window) == length - whole + 5
        assert cached(after.reply(prompt(length))) == whole  # from memory now
    assert outcome(again) == outcome(first)


def test_memory_and_disk_each_give_a_part(tmp_path: Path) -> None:
    """A text longer than what memory may keep goes to the disk whole, and comes back from both."""
    text = prompt(5 * PAGE + 3)
    with served(tmp_path, budget=1) as before:
        first = before.reply(text)
    with served(tmp_path, budget=1) as after:
        assert cached(after.reply(text)) == 5 * PAGE
        assert after.engine.wait_idle(LIMIT)
        after.kept.drop(after.kept.pages - 2)
        again = after.reply(text)
        assert cached(again) == 5 * PAGE
    assert outcome(again) == outcome(first)


def test_pages_that_wait_for_the_disk_give_way_to_replies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is stuck keeps no request waiting, though every page of the cache waits for it."""
    stuck = threading.Event()
    monkeypatch.setattr(PageStore, "write", lambda self, *args: stuck.wait(LIMIT))
    with served(tmp_path, pages=8, budget=1) as running:
        try:
            replies = [running.reply(prompt(5 * PAGE + 1, seed)) for seed in range(4)]
        finally:
            stuck.set()
    assert all(cached(reply) == 0 for reply in replies)


def test_what_memory_let_go_of_comes_back(tmp_path: Path) -> None:
    with served(tmp_path, budget=3) as running:
        first = running.reply(prompt(3 * PAGE + 1, seed=1))
        running.reply(prompt(3 * PAGE + 1, seed=2))
        again = running.reply(prompt(3 * PAGE + 1, seed=1))
        assert cached(again) == 3 * PAGE
    assert outcome(again) == outcome(first)


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_damaged_page_is_read_anew_and_what_follows_it_too(
    broken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = prompt(3 * PAGE + 9)
    with served(tmp_path) as before:
        first = before.reply(text)
        keys = before.kept.keys(text)
    [file] = tmp_path.glob(f"{keys[broken].hex()}-*.page")
    data = bytearray(file.read_bytes())
    data[-1 - random.Random(broken).randrange(PAGE * 8)] ^= 4
    file.write_bytes(data)
    with caplog.at_level(logging.WARNING), served(tmp_path) as after:
        again = after.reply(text)
        assert cached(again) == broken * PAGE
    assert "W_DISK_CACHE" in caplog.text
    assert outcome(again) == outcome(first)
    with served(tmp_path) as healed:
        assert cached(healed.reply(text)) == 3 * PAGE


def test_writing_never_holds_up_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a disk that does not answer at all, replies come as without one."""
    stuck = threading.Event()
    real = PageStore.write
    monkeypatch.setattr(PageStore, "write", lambda self, *args: stuck.wait(LIMIT) and real(self, *args))
    with served(tmp_path) as running:
        try:
            for seed in range(4):
                assert cached(running.reply(prompt(2 * PAGE + 1, seed))) == 0
        finally:
            stuck.set()
    assert len(list(tmp_path.glob("*.page"))) >= 1


def test_a_disk_that_fails_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: PageStore, *args: object) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(PageStore, "write", fail)
    with served(tmp_path) as running:
        replies = [running.reply(prompt(2 * PAGE + 1, seed)) for seed in range(3)]
    assert all(reply.finished for reply in replies)
    assert caplog.text.count("writing failed") == 1


def test_a_disk_that_does_not_read_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt(3 * PAGE + 1)
    with served(tmp_path) as before:
        first = before.reply(text)
    stuck = threading.Event()
    monkeypatch.setattr("tfglm.cache.tier.READ_LIMIT_S", 0.2)
    monkeypatch.setattr(PageStore, "read", lambda self, key: stuck.wait(LIMIT) and None)
    with served(tmp_path) as after:
        try:
            again = after.reply(text)
        finally:
            stuck.set()
        assert cached(again) == 0
    assert outcome(again) == outcome(first)


@pytest.mark.parametrize("seed", range(3))
def test_random_chats_across_restarts_are_the_fresh_ones(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    texts = []
    for _ in range(12):
        beginning = prompt(dice.choice([0, PAGE, 2 * PAGE + 17, 3 * PAGE]), seed=dice.randrange(2))
        texts.append([*beginning, *prompt(dice.randrange(1, 300), seed=dice.randrange(3))])
    fresh = []
    for text in texts:
        with served(tmp_path / f"fresh{len(fresh)}", budget=0) as alone:
            fresh.append(outcome(alone.reply(text)))
    found, some = [], 0
    for start in range(0, 12, 3):
        budget = dice.choice([1, 4, 9])
        with served(tmp_path / "shared", pages=12, budget=budget, prefill_rows=100, parallel=3) as running:
            wanted = [request(f"r{n}", text, 6, seed=4, logprobs=1) for n, text in enumerate(texts[start : start + 3])]
            receivers = [ask(running.engine, one) for one in wanted]
            found += [outcome(receiver) for receiver in receivers]
            some += sum(cached(receiver) for receiver in receivers)
    assert found == fresh and some > 0


def test_an_error_of_any_kind_beside_the_disk_is_given_up_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that writes lives on: what waits for it could not be let go of otherwise."""

    def fail(self: Pages, page: int) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(Pages, "read", fail)
    with served(tmp_path) as running:
        replies = [running.reply(prompt(2 * PAGE + 1, seed)) for seed in range(3)]
    assert all(reply.finished for reply in replies)
    assert caplog.text.count("writing failed (MemoryError") == 1
    assert not any(block.pending for block in running.kept._blocks.values())


def test_a_page_that_memory_has_no_room_for_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = prompt(3 * PAGE + 1)
    with served(tmp_path) as before:
        first = before.reply(text)

    def fail(self: PageStore, key: bytes) -> bytearray:
        raise MemoryError

    monkeypatch.setattr(PageStore, "read", fail)
    with served(tmp_path) as after:
        again = after.reply(text)
        assert cached(again) == 0
    assert outcome(again) == outcome(first)


def soon(fetch: Fetch) -> bytearray | None:
    while True:
        with suppress(PageLateError):
            page = fetch.next()
            if page is not None:
                fetch.taken()
            return page


def test_a_slow_disk_holds_up_no_other_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one prompt waits for its page, another's is read and its whole reply written."""
    text = prompt(3 * PAGE + 1)
    with served(tmp_path) as before:
        first = before.reply(text)
    read, other_ended = PageStore.read, threading.Event()
    monkeypatch.setattr("tfglm.cache.tier.READ_LIMIT_S", LIMIT)

    def slow(self: PageStore, key: bytes) -> bytearray | None:
        assert other_ended.wait(LIMIT)
        return read(self, key)

    monkeypatch.setattr(PageStore, "read", slow)
    with served(tmp_path, parallel=2) as after:
        again = ask(after.engine, request("a", text, 6, seed=4, logprobs=1))
        other = ask(after.engine, request("b", prompt(40, seed=9), 20, seed=1, ignore_eos=True))
        assert other.finished and not again.ended.is_set()
        other_ended.set()
        assert cached(again) == 3 * PAGE
        assert after.engine.snapshot().chunks == 2, "of one forward each"
    assert outcome(again) == outcome(first)


def test_pages_that_wait_to_be_taken_are_bounded_for_all_fetches_together(tmp_path: Path) -> None:
    """And a fetch that comes when the others hold them all still gives its own."""
    keys = [bytes([n]) * 32 for n in range(3 * AHEAD)]
    with closing(PageStore(tmp_path, WHO, 4, limit=1 << 30, keep_free=0)) as store:
        for n, key in enumerate(keys):
            store.write(key, keys[n - 1], bytes([n] * 4))
        readers = Readers()
        first, second = Fetch(store, keys, readers), Fetch(store, keys, readers)
        assert readers.ahead == AHEAD
        assert [soon(second) for _ in range(5)] == [bytes([n] * 4) for n in range(5)]
        assert readers.ahead <= AHEAD + 1
        first.close()
        assert list(iter(lambda: soon(second), None)) == [bytes([n] * 4) for n in range(5, len(keys))]
        assert readers.ahead == 0 and second.next() is None
        readers.pool.shutdown()
