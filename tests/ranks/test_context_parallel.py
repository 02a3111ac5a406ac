"""Caches dealt out to ranks: the same choice of tokens, the same replies to rounding, and exact among themselves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from threaded_ranks import ThreadGroup, spread

from tfglm.cache.pages import PAGE
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows

BOUND = 2e-5
"""Of logits, largest difference to one rank with a float32 cache: sums in another order."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("dealt")
    write_checkpoint(path, "tiny", seed=2, num_hidden_layers=5, n_routed_experts=4, index_topk=24, vocab_size=320)
    with Checkpoint.open(path) as checkpoint:
        yield checkpoint


def text(length: int, seed: int) -> list[int]:
    return torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def read_and_written(model: Glm53, prompt: list[int], reply: list[int], chunks: list[int]) -> torch.Tensor:
    """Logits of the prompt's rows, read in chunks, and of the reply's, one by one."""
    stream, found, start = model.open_stream(), [], 0
    for size in chunks:
        part = prompt[start : start + size]
        if not part:
            break
        found.append(model.forward([Rows(stream, part, len(part), prompt=True)]))
        start += size
    assert start >= len(prompt)
    found += [model.forward([Rows(stream, [token], 1)]) for token in reply]
    stream.close()
    return torch.cat(found)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_logits_are_those_of_one_rank(ranks: int, tiny: Checkpoint) -> None:
    """Prompts and replies, past index_topk and past a page of every rank; with 8 ranks some have no head."""
    prompt, reply = text(PAGE * ranks + 70, 1), text(40, 2)
    one = load_model(tiny, tokens=PAGE * (ranks + 2), kv="fp32")
    expected = read_and_written(one, prompt, reply, [300] * 9)
    with spread(tiny, ranks, tokens=3 * PAGE, kv="fp32", cp=True) as [model, *_]:
        assert model.tokens_total == 3 * PAGE * ranks
        found = read_and_written(model, prompt, reply, [300] * 9)
    assert (found - expected).abs().max() < BOUND


def test_a_short_stream_leaves_ranks_without_a_token(tiny: Checkpoint) -> None:
    one = load_model(tiny, tokens=PAGE, kv="fp32")
    expected = read_and_written(one, text(1, 3), text(12, 4), [1])
    with spread(tiny, 5, tokens=PAGE, kv="fp32", cp=True) as [model, *_]:
        found = read_and_written(model, text(1, 3), text(12, 4), [1])
    assert (found - expected).abs().max() < BOUND


def test_rows_do_not_depend_on_chunks_nor_on_their_neighbours(tiny: Checkpoint) -> None:
    prompt, reply = text(150, 5), text(9, 6)
    with spread(tiny, 3, tokens=3 * PAGE, cp=True) as [model, *_]:
        expected = read_and_written(model, prompt, reply, [150])
        for chunks in ([1] * 20 + [130], [64, 64, 64], [149, 1]):
            assert torch.equal(read_and_written(model, prompt, reply, chunks), expected)

        stream, other = model.open_stream(), model.open_stream()
        model.forward([Rows(stream, prompt, 1, prompt=True)])
        model.forward([Rows(other, text(31, 7), 1, prompt=True)])
        together = model.forward([Rows(other, text(4, 8), 4), Rows(stream, reply, len(reply))])
        assert torch.equal(together[4:], expected[len(prompt) :])
        stream.truncate(len(prompt) + 2)  # as after drafts that were refused
        again = model.forward([Rows(stream, reply[2:6], 4)])
        assert torch.equal(again, expected[len(prompt) + 2 : len(prompt) + 6])
        both = model.open_stream()
        pair = [Rows(both, prompt[:40], 40, prompt=True)]
        assert torch.equal(model.forward(pair), expected[:40])


def test_two_prompts_in_one_window(tiny: Checkpoint) -> None:
    first, second = text(100, 9), text(37, 10)
    with spread(tiny, 3, tokens=3 * PAGE, cp=True) as [model, *_]:
        alone = [read_and_written(model, one, [], [len(one)]) for one in (first, second)]
        streams = [model.open_stream() for _ in range(2)]
        window = [Rows(s, t, len(t), prompt=True) for s, t in zip(streams, (first, second), strict=True)]
        assert torch.equal(model.forward(window), torch.cat(alone))


def test_a_long_prompts_rows_are_gathered_some_at_a_time(tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two streams in a window, at and past the edge of a gather: the same bits, and no gather of more rows."""
    texts = text(4 * PAGE, 12), text(2 * PAGE + 3, 13)
    most = 0

    def counted(self: ThreadGroup, part: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(part))
        return gather(self, part)

    def last_rows() -> torch.Tensor:
        streams = [model.open_stream() for _ in texts]
        for stream, words in zip(streams, texts, strict=True):
            for start in range(0, len(words) - 9, 128):
                model.forward([Rows(stream, words[start : min(start + 128, len(words) - 9)], 0, prompt=True)])
        window = [Rows(s, words[-9:], 9, prompt=True) for s, words in zip(streams, texts, strict=True)]
        found = model.forward(window)
        for stream in streams:
            stream.close()
        return found

    with spread(tiny, 2, tokens=4 * PAGE, cp=True) as [model, *_]:
        expected = last_rows()
        gather = ThreadGroup.gather
        monkeypatch.setattr(ThreadGroup, "gather", counted)
        monkeypatch.setattr("tfglm.models.context.GATHERED_PAGES", 1)
        assert torch.equal(last_rows(), expected)
    assert most == PAGE


def test_every_rank_holds_its_share_of_a_stream(tiny: Checkpoint) -> None:
    with spread(tiny, 3, tokens=2 * PAGE, cp=True) as models:
        stream = models[0].open_stream()
        for model in models:
            for planes in model.cache.layers:
                planes.latent.fill_(float("nan"))
        models[0].forward([Rows(stream, text(100, 11), 1, prompt=True)])
        page = stream.pages[0]
        for rank, model in enumerate(models):
            held = ~model.cache.layers[0].latent[page].isnan().any(dim=1)
            assert held.nonzero()[:, 0].tolist() == list(range((100 + 2 - rank) // 3))
