"""The model's edges: arguments it refuses, memory it does not have, what a failure leaves behind, loading."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tfglm.cache.pages import PAGE, Stream
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.models.window import Rows


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path = tmp_path_factory.mktemp("forward") / "tiny"
    write_checkpoint(path, "tiny", seed=2)
    with Checkpoint.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def loaded(checkpoint: Checkpoint) -> Glm53:
    return load_model(checkpoint, tokens=3 * PAGE)


@pytest.fixture
def model(loaded: Glm53) -> Iterator[Glm53]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield loaded
    torch.set_num_threads(threads)
    assert loaded.tokens_free == loaded.tokens_total, "a stream was left open"


@pytest.fixture
def stream(model: Glm53) -> Iterator[Stream]:
    stream = model.open_stream()
    yield stream
    stream.close()


def test_logits_and_length(model: Glm53, stream: Stream) -> None:
    logits = model.forward([Rows(stream, [5, 6, 7], 2)])
    assert (logits.shape, logits.dtype, stream.length) == ((2, model.config.vocab_size), torch.float32, 3)
    assert model.forward([Rows(stream, [8], 0)]).shape == (0, model.config.vocab_size)
    assert stream.length == 4
    assert not logits.requires_grad


def test_order_of_several_streams(model: Glm53, stream: Stream) -> None:
    other = model.open_stream()
    together = model.forward([Rows(stream, [1, 2, 3], 2), Rows(other, [4, 5], 0)])
    assert together.shape[0] == 2
    first, second = model.open_stream(), other
    second.truncate(0)
    logits = model.forward([Rows(second, [4, 5], 1), Rows(first, [1, 2, 3], 2)])
    assert torch.equal(logits[1:], together)
    first.close()
    other.close()


@pytest.mark.parametrize("tokens", [(5, 6), np.array([5, 6]), range(5, 7)], ids=["tuple", "numpy", "range"])
def test_any_sequence_of_ids(model: Glm53, stream: Stream, tokens: object) -> None:
    logits = model.forward([Rows(stream, tokens, 2)])  # type: ignore[arg-type]
    stream.truncate(0)
    assert torch.equal(logits, model.forward([Rows(stream, [5, 6], 2)]))


def test_refused_windows(model: Glm53, stream: Stream) -> None:
    vocab = model.config.vocab_size
    model.forward([Rows(stream, [1, 2, 3], 0)])
    closed = model.open_stream()
    closed.close()
    foreign = Stream(type(stream.pool)(1))
    too_long = [0] * (model.config.max_position_embeddings - 2)
    cases = [
        ([], "an empty window"),
        ([Rows(stream, [], 0)], "has no tokens"),
        ([Rows(stream, [vocab], 1)], f"the vocabulary is 0 to {vocab - 1}"),
        ([Rows(stream, [3, -1], 1)], "token ids -1 to 3"),
        ([Rows(stream, [1], 2)], "wants the logits of 2 rows; it has 1"),
        ([Rows(stream, [1], -1)], "wants the logits of -1 rows"),
        ([Rows(stream, [1], 1), Rows(stream, [2], 1)], "a stream appears twice"),
        ([Rows(stream, [1], 1), Rows(closed, [2], 1)], "entry 1 of the window: its stream is closed"),
        ([Rows(foreign, [2], 1)], "of another model"),
        ([Rows(stream, too_long, 1)], f"the model reads {model.config.max_position_embeddings}"),
    ]
    for window, message in cases:
        with pytest.raises(ValueError, match=message):
            model.forward(window)
        assert (stream.length, len(stream.pages), model.tokens_free) == (3, 1, 2 * PAGE)


def test_full_cache_changes_nothing(model: Glm53, stream: Stream) -> None:
    logits = model.forward([Rows(stream, [1, 2, 3], 1)])
    other = model.open_stream()
    with pytest.raises(MemoryShortError, match="the cache is full"):
        model.forward([Rows(stream, [4] * PAGE, 1), Rows(other, [4] * (PAGE + 1), 1)])
    assert (stream.length, other.length, model.tokens_free) == (3, 0, 2 * PAGE)
    model.forward([Rows(other, [4] * (2 * PAGE), 0)])
    with pytest.raises(MemoryShortError, match=f"all of its {3 * PAGE} tokens"):
        model.open_stream()
    other.close()
    stream.truncate(2)
    assert torch.equal(model.forward([Rows(stream, [3], 1)]), logits)


def test_a_failure_inside_changes_nothing(model: Glm53, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(40))
    model.forward([Rows(stream, prompt, 0)])
    expected = model.forward([Rows(stream, [7], 1)])
    stream.truncate(40)

    def fail(*_: object) -> None:
        raise RuntimeError("no more memory")

    for operation in ("attend", "experts", "linear"):
        with monkeypatch.context() as patch:
            patch.setattr(model.ops, operation, fail)
            with pytest.raises(RuntimeError, match="no more memory"):
                model.forward([Rows(stream, [9] * PAGE, 1)])
        assert (stream.length, len(stream.pages), model.tokens_free) == (40, 1, 2 * PAGE)
    assert torch.equal(model.forward([Rows(stream, [7], 1)]), expected)


def test_a_new_thread_gives_the_same_bits(model: Glm53, stream: Stream) -> None:
    """A thread starts with the process's default number of BLAS threads, not with torch's."""
    expected = model.forward([Rows(stream, list(range(50)), 50)])
    stream.truncate(0)
    results = []
    thread = threading.Thread(target=lambda: results.append(model.forward([Rows(stream, list(range(50)), 50)])))
    thread.start()
    thread.join(timeout=60)
    assert torch.equal(results[0], expected)


def test_capacity_is_whole_pages(loaded: Glm53, checkpoint: Checkpoint) -> None:
    model = load_model(checkpoint, tokens=PAGE + 1)
    assert model.tokens_total == model.tokens_free == 2 * PAGE
    stream = model.open_stream()
    assert model.tokens_free == 2 * PAGE
    model.forward([Rows(stream, [1], 0)])
    assert model.tokens_free == PAGE


def test_progress_counts_bytes_of_the_trunk(checkpoint: Checkpoint) -> None:
    calls: list[tuple[int, int]] = []
    load_model(checkpoint, tokens=1, progress=lambda done, total: calls.append((done, total)))
    mtp = f"model.layers.{checkpoint.config.num_hidden_layers}."
    trunk = {name: entry for name, entry in checkpoint.entries.items() if not name.startswith(mtp)}
    assert checkpoint.config.num_nextn_predict_layers == 1 and len(trunk) < len(checkpoint.entries)
    assert len(calls) == len(trunk)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert {total for _, total in calls} == {sum(entry.nbytes for entry in trunk.values())} == {calls[-1][0]}


def test_every_trunk_tensor_is_read_once_and_no_other(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    read = Checkpoint.read
    monkeypatch.setattr(Checkpoint, "read", lambda self, name, *part: (names.append(name), read(self, name, *part))[1])
    load_model(checkpoint, tokens=1)
    mtp = f"model.layers.{checkpoint.config.num_hidden_layers}."
    assert sorted(names) == sorted(name for name in checkpoint.entries if not name.startswith(mtp))


def test_refused_device(checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="device is 'tpu'"):
        load_model(checkpoint, tokens=1, device="tpu")


def test_memory_after_loading(checkpoint: Checkpoint, loaded: Glm53) -> None:
    """Matrices stay as they are stored; only vectors are widened."""

    def tensors(value: object) -> Iterator[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            for item in value:
                yield from tensors(item)
        elif hasattr(value, "__dataclass_fields__"):
            for name in value.__dataclass_fields__:
                yield from tensors(getattr(value, name))

    held = list(tensors(loaded.weights))
    assert {t.dtype for t in held if t.dim() > 1} == {torch.bfloat16}
    mtp = f"model.layers.{checkpoint.config.num_hidden_layers}."
    stored = sum(entry.nbytes for name, entry in checkpoint.entries.items() if not name.startswith(mtp))
    assert stored <= sum(t.untyped_storage().nbytes() for t in held) <= 1.01 * stored
