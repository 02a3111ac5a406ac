"""The whole model on the GPU: near the reference, a row's bits the same in every window, graphs equal to launches."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.formats.latent import KvFormat
from tfglm.models.glm53 import Glm53
from tfglm.models.glm53_cuda import CudaGlm53, load_weights
from tfglm.models.load import load_model
from tfglm.models.source import CheckpointSource
from tfglm.models.taps import Taps
from tfglm.models.window import Rows
from tfglm.ops.cuda import CudaOps, Precision

pytestmark = pytest.mark.gpu

TOKENS = torch.randint(0, 1400, (70,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    path: Path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, "tiny", seed=3)
    with Checkpoint.open(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(checkpoint: Checkpoint) -> Glm53:
    return load_model(checkpoint, tokens=512)


def on(device: torch.device, checkpoint: Checkpoint, graphs: bool = False, **precision: object) -> CudaGlm53:
    ops = CudaOps(Precision(**precision), device)  # type: ignore[arg-type]
    weights = load_weights(checkpoint.config, CheckpointSource(checkpoint), ops)
    return CudaGlm53(checkpoint.config, weights, ops, tokens=1024, graphs=graphs)


def rows_of(model: Glm53, cuts: list[int], tokens: list[int] = TOKENS, read: int = 0) -> torch.Tensor:
    """Logits of every token, fed in windows of these lengths; read: how many of the windows are a prompt's."""
    stream, parts, at = model.open_stream(), [], 0
    for number, cut in enumerate(cuts):
        parts.append(model.forward([Rows(stream, tokens[at : at + cut], cut, prompt=number < read)]))
        at += cut
    stream.close()
    return torch.cat(parts)


def typical_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the middle row: a row whose choice of experts is turned over by a rounding differs much more."""
    return float(((got - want).norm(dim=1) / want.norm(dim=1)).median())


def test_near_the_reference(checkpoint: Checkpoint, reference: Glm53, device: torch.device) -> None:
    model = on(device, checkpoint)
    want, got = rows_of(reference, [30]), rows_of(model, [30])
    assert got.dtype == torch.float32
    assert got.device.type == "cpu"
    assert typical_error(got, want) < 0.03  # activations are bfloat16 here and float32 there
    assert float((got.argmax(dim=1) == want.argmax(dim=1)).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("precision", "error"),
    [
        ({"kv": KvFormat.FP8}, 0.06),
        ({"kv": KvFormat.FP4}, 0.25),
        ({"kv": KvFormat.FP4X}, 0.25),
        ({"dense": "q8", "head": "fp8"}, 0.1),
        ({"dense": "q4", "head": "q8", "kv": KvFormat.FP8}, 0.5),
    ],
)
def test_narrow_formats(
    precision: dict[str, object], error: float, checkpoint: Checkpoint, reference: Glm53, device: torch.device
) -> None:
    model = on(device, checkpoint, **precision)
    whole = rows_of(model, [70])
    assert typical_error(whole[:30], rows_of(reference, [30])) < error
    assert torch.equal(rows_of(model, [40, 1, 3, 16, 10]), whole)


def test_a_row_s_bits_do_not_depend_on_its_window(checkpoint: Checkpoint, device: torch.device) -> None:
    """Below, across and above index_topk (32), by decode, verify and prompt kernels, alone and beside other streams."""
    model = on(device, checkpoint)
    whole = rows_of(model, [70])
    for cuts in ([1] * 70, [25, 9, 2, 16, 1, 17], [33, 37], [16, 16, 16, 16, 6]):
        assert torch.equal(rows_of(model, cuts), whole), cuts
    one, two = model.open_stream(), model.open_stream()
    model.forward([Rows(one, TOKENS[:40], 0), Rows(two, TOKENS[1:30], 0)])
    both = model.forward([Rows(two, TOKENS[30:34], 2), Rows(one, TOKENS[40:44], 4)])
    assert torch.equal(both[2:], whole[40:44])
    assert torch.equal(both[:2], rows_of(model, [33], TOKENS[1:34])[-2:])
    one.truncate(42)
    assert torch.equal(model.forward([Rows(one, TOKENS[42:45], 3)]), whole[42:45])


def test_graphs_equal_launches(checkpoint: Checkpoint, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("graphs need a GPU")
    eager, replayed = on(device, checkpoint), on(device, checkpoint, graphs=True)
    want = rows_of(eager, [70])
    for cuts in ([20, *[1] * 50], [17, 5, 16, 2, 2, 1, 1, 16, 10], [1] * 70):
        assert torch.equal(rows_of(replayed, cuts), want), cuts
    taps = Taps(normed=True, layers=(2, 8))
    stream = replayed.open_stream()
    replayed.forward([Rows(stream, TOKENS[:40], 0)])
    first = replayed.forward_tapped([Rows(stream, TOKENS[40:42], 2)], taps)
    kept = {layer: x.clone() for layer, x in first.streams.items()}
    second = replayed.forward_tapped([Rows(stream, TOKENS[42:44], 1)], taps)
    assert torch.equal(second.logits[0], want[43])
    assert all(torch.equal(first.streams[layer], kept[layer]) for layer in taps.layers)
    other = eager.open_stream()
    eager.forward([Rows(other, TOKENS[:40], 0)])
    whole = eager.forward_tapped([Rows(other, TOKENS[40:44], 4)], taps)
    assert second.normed is not None and whole.normed is not None
    assert torch.equal(second.normed, whole.normed[2:])
    assert torch.equal(second.streams[8], whole.streams[8][2:])


def test_exl3_experts(tmp_path: Path, device: torch.device) -> None:
    """Quantised experts: near the reference, the same bits in every window that decodes, and in graphs."""
    if device.type != "cuda":
        pytest.skip("these kernels need a GPU")
    write_checkpoint(tmp_path, "tiny", seed=4, expert_bits=2.75)
    with Checkpoint.open(tmp_path) as opened:
        model, replayed = on(device, opened), on(device, opened, graphs=True)
        want = rows_of(load_model(opened, tokens=512), [30])
    got = rows_of(model, [30])
    assert typical_error(got, want) < 0.04
    whole = rows_of(model, [1] * 70)
    for cuts in ([16, 16, 16, 16, 6], [3, 9, 16, 1, 1, 10, 14, 16]):
        assert torch.equal(rows_of(model, cuts), whole), cuts
        assert torch.equal(rows_of(replayed, cuts), whole), cuts


def test_exl3_prompts_are_read_alike_however_they_are_cut(tmp_path: Path, device: torch.device) -> None:
    """Hence a prompt may go on from what another one has cached. Rows that are decoded have other bits, in every window
    the same."""
    if device.type != "cuda":
        pytest.skip("these kernels need a GPU")
    write_checkpoint(tmp_path, "tiny", seed=4, expert_bits=2.75)
    with Checkpoint.open(tmp_path) as opened:
        model, replayed = on(device, opened), on(device, opened, graphs=True)
    assert not model.decodes_alike
    whole = rows_of(model, [70], read=1)
    for cuts in ([1] * 70, [17, 16, 1, 33, 3], [40, 7, 23], [64, 6], [5, 65]):
        assert torch.equal(rows_of(model, cuts, read=70), whole), cuts
    after = rows_of(model, [50, *[1] * 20], read=1)
    assert torch.equal(after[:50], whole[:50]) and not torch.equal(after[50:], whole[50:])
    for cuts, read in (([50, 16, 4], 1), ([20, 14, 16, 9, 11], 3)):
        assert torch.equal(rows_of(model, cuts, read=read), after), cuts
        assert torch.equal(rows_of(replayed, cuts, read=read), after), cuts


def test_a_chunk_of_which_no_logits_are_wanted_is_done_when_it_returns(
    checkpoint: Checkpoint, device: torch.device
) -> None:
    """Its time is what other replies get their share of."""
    model = on(device, checkpoint)
    model.forward([Rows(model.open_stream(), TOKENS[:70], 0)])
    assert torch.cuda.current_stream(device).query()
