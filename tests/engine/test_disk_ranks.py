"""Prompt states of a model over ranks, each rank's on a disk of its own: what all have is gone on from, and the reply
is that of a prompt that was read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import LIMIT, Receiver, ask
from threaded_ranks import spread

from tfglm.cache.disk import PageStore
from tfglm.cache.kept import KeptStates
from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE, PagePool, Stream
from tfglm.cache.ranked_disk import DiskFollower, RankedDiskTier
from tfglm.cache.tier import Pages
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.drafts.choose import load_drafter
from tfglm.drafts.costs import Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.states import PromptStates
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.ops.group import Alone, Message
from tfglm.settings import Settings

WHO = b"w" * 32
RANKS = 3
PROMPT = torch.randint(0, 250, (3 * PAGE + 20,), generator=torch.Generator().manual_seed(4)).tolist()
WANTED = GenerationRequest("a", PROMPT, SamplingParams(seed=1), max_tokens=8, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("disk_ranks")
    write_checkpoint(path, "tiny", seed=1, num_hidden_layers=4, n_routed_experts=4, index_topk=32, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def folder_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}"


def store(folder: Path, rank: int, pages: Pages) -> PageStore:
    return PageStore(folder_of(folder, rank), WHO, pages.nbytes, limit=1 << 30, keep_free=0)


@contextmanager
def served(folder: Path, tiny: Checkpoint, *, cp: bool = False) -> Iterator[Engine]:
    """Three ranks with MTP drafts, started anew."""
    followers: list[DiskFollower] = []

    def handlers(checkpoint: Checkpoint, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        drafter = load_drafter("mtp", checkpoint, model, Settings())
        assert drafter is not None
        pages = Pages([*model.cache.layers, *drafter.planes])
        follower = DiskFollower(pages, store(folder, model.group.rank, pages), model.group)
        followers.append(follower)
        return {**drafter.handlers(model), **follower.handlers()}

    tokenizer = Tokenizer.from_folder(tiny.path)
    with spread(tiny, RANKS, handlers=handlers, tokens=16 * PAGE, cp=cp) as [model, *_]:
        drafter = load_drafter("mtp", tiny, model, Settings())
        assert drafter is not None
        speculator = Speculator(drafter, Policy(Costs((1.0,) * 16)), copy=False, vocab_size=tokenizer.vocab_size)
        pages = Pages([*model.cache.layers, *drafter.planes])
        kept = KeptStates(model.cache.pool, 8, WHO)
        tier = RankedDiskTier(kept, pages, store(folder, 0, pages), model.group)
        states = PromptStates(kept, tier, replies=model.decodes_alike)
        engine = Engine(model, tokenizer, Settings(context=8 * PAGE), [0], Drafting(speculator), states)
        engine.start()
        try:
            yield engine
        finally:
            assert engine.stop(LIMIT)
    for follower in followers:
        follower.close()


def reply(engine: Engine, wanted: GenerationRequest = WANTED) -> Receiver:
    receiver = ask(engine, wanted)
    assert receiver.finished
    assert engine.wait_idle(LIMIT)
    return receiver


def outcome(receiver: Receiver) -> tuple[object, ...]:
    *rest, usage = receiver.outcome()
    return *rest, replace(usage, cached_tokens=0)


def cached(receiver: Receiver) -> int:
    return receiver.finished.usage.cached_tokens


def test_a_prompt_resumes_after_a_restart_of_all_ranks(tmp_path: Path, tiny: Checkpoint) -> None:
    with served(tmp_path, tiny) as engine:
        first = reply(engine)
    counts = [len(list(folder_of(tmp_path, rank).glob("*.page"))) for rank in range(RANKS)]
    assert cached(first) == 0 and counts == [3, 3, 3]
    with served(tmp_path, tiny) as engine:
        again = reply(engine)
        longer = reply(engine, replace(WANTED, id="b", prompt=[*PROMPT[: 2 * PAGE], *PROMPT[:9]]))
    assert cached(again) == 3 * PAGE and cached(longer) == 2 * PAGE
    assert outcome(again) == outcome(first)
    with served(tmp_path / "fresh", tiny) as engine:
        assert outcome(reply(engine, replace(WANTED, id="b", prompt=[*PROMPT[: 2 * PAGE], *PROMPT[:9]]))) == outcome(
            longer
        )


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_slow_disk_of_one_rank_holds_up_no_other_reply(
    rank: int, tmp_path: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one prompt waits for a page of that rank, another's is read and its whole reply written."""
    with served(tmp_path, tiny) as engine:
        first = reply(engine)
    read, other_ended = PageStore.read, threading.Event()
    monkeypatch.setattr("tfglm.cache.tier.READ_LIMIT_S", LIMIT)

    def slow(self: PageStore, key: bytes) -> bytearray | None:
        assert self._folder != folder_of(tmp_path, rank) or other_ended.wait(LIMIT / 4)
        return read(self, key)

    monkeypatch.setattr(PageStore, "read", slow)
    with served(tmp_path, tiny) as engine:
        again = ask(engine, WANTED)
        other = ask(engine, replace(WANTED, id="b", prompt=PROMPT[5:40]))
        assert other.finished and not again.ended.is_set()
        other_ended.set()
        assert cached(again) == 3 * PAGE
    assert outcome(again) == outcome(first)


def test_what_a_rank_has_on_its_disk_is_not_copied_to_be_written_again(
    tmp_path: Path, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy = Pages.read
    monkeypatch.setattr(Pages, "read", lambda self, page: (copied.append(page), copy(self, page))[1])
    with served(tmp_path, tiny) as engine:
        reply(engine)
    assert len(copied) == 3 * RANKS
    with served(tmp_path, tiny) as engine:
        assert cached(reply(engine)) == 3 * PAGE
    assert len(copied) == 3 * RANKS


class Listening(Alone):
    """Hears what is announced."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def announce(self, message: Message) -> None:
        self.messages.append(message)


def test_a_long_reply_is_kept_with_one_message(tmp_path: Path) -> None:
    """Its pages all become kept when it ends; a follower is given up when it is a thousand messages behind."""
    pages, group = 1500, Listening()
    pool = PagePool(pages)
    kept = KeptStates(pool, pages, WHO)
    planes = Pages([LayerPlanes(torch.zeros(pages, 1), torch.zeros(pages, 1), None)])
    tier = RankedDiskTier(kept, planes, store(tmp_path, 0, planes), group)
    tier._broken = True  # nothing is to be written here
    stream = Stream(pool)
    stream.pages = pool.take(pages)
    keys = kept.keys(range(pages * PAGE))
    assert kept.keep(stream, keys) == pages
    tier.close()
    [message] = group.messages
    assert message.integers("pages") == stream.pages
    found = [row.tobytes() for row in message.arrays["keys"].numpy()]
    assert found[::2] == keys and found[1::2] == [kept.root, *keys[:-1]]


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("how", ["missing", "damaged"])
def test_what_one_rank_lacks_is_read_again_by_all(how: str, rank: int, tmp_path: Path, tiny: Checkpoint) -> None:
    with served(tmp_path, tiny) as engine:
        first = reply(engine)
    files = sorted(folder_of(tmp_path, rank).glob("*.page"), key=lambda path: path.stat().st_mtime_ns)
    if how == "missing":
        files[1].unlink()
    else:
        *most, last = files[1].read_bytes()
        files[1].write_bytes(bytes([*most, last ^ 1]))
    with served(tmp_path, tiny) as engine:
        again = reply(engine)
        memory = reply(engine)
    assert cached(again) == PAGE
    assert cached(memory) == 3 * PAGE
    assert outcome(again) == outcome(first) == outcome(memory)


def test_dealt_out_pages_resume_too(tmp_path: Path, tiny: Checkpoint) -> None:
    """Context parallel: a page is 256 tokens of every rank."""
    prompt = (PROMPT * 3)[: 6 * PAGE + 50]
    wanted = replace(WANTED, prompt=prompt)
    with served(tmp_path, tiny, cp=True) as engine:
        first = reply(engine, wanted)
        memory = reply(engine, wanted)
    with served(tmp_path, tiny, cp=True) as engine:
        again = reply(engine, wanted)
    assert [cached(one) for one in (first, memory, again)] == [0, 6 * PAGE, 6 * PAGE]
    assert outcome(again) == outcome(first) == outcome(memory)
