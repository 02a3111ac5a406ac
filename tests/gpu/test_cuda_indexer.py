"""Index scores and the selection on the GPU: exact against the total order, bit for bit in every window."""

import pytest
import torch

from tfglm.formats import latent as formats
from tfglm.formats.latent import KvFormat
from tfglm.ops import cuda_indexer, driver, order
from tfglm.ops.base import Selection, Window

pytestmark = pytest.mark.gpu

PAGE = 256
SIZES = [(32, 128), (16, 32)]


class Cached:
    """Index keys of two streams in shuffled pages, and rows that look at them."""

    def __init__(self, heads: int, width: int, kv: KvFormat, lengths: tuple[int, int], device: torch.device) -> None:
        generator = torch.Generator().manual_seed(heads + lengths[0])
        per_stream = -(-max(lengths) // PAGE)
        order_of_pages = torch.randperm(2 * per_stream, generator=generator)
        self.pages = order_of_pages.view(2, per_stream).to(device)
        self.keys = torch.randn(2, per_stream * PAGE, width, generator=generator).bfloat16().float()
        packed = torch.from_numpy(formats.pack_index(kv, self.keys.flatten(0, 1).numpy()))
        plane = torch.empty(2 * per_stream, PAGE, packed.shape[1], dtype=torch.uint8)
        plane[order_of_pages] = packed.view(-1, PAGE, packed.shape[1])
        self.plane = plane.to(device)
        self.values = torch.from_numpy(formats.unpack_index(kv, packed.numpy())).view(self.keys.shape).double()
        self.kv, self.heads, self.width, self.device, self.generator = kv, heads, width, device, generator

    def rows(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [count, heads, width] and head weights [count, heads], both views of wider rows."""
        wide = torch.randn(count, self.heads, self.width, generator=self.generator).bfloat16().to(self.device)
        weights = torch.randn(count, self.width + self.heads, generator=self.generator).bfloat16().to(self.device)
        return wide, weights[:, self.width :]

    def window(self, positions: list[int], streams: list[int]) -> Window:
        at = torch.tensor(positions, device=self.device)
        of = torch.tensor(streams, device=self.device)
        return Window(at, torch.zeros_like(at), self.pages, of, ())

    def scores(
        self, queries: torch.Tensor, weights: torch.Tensor, positions: list[int], streams: list[int]
    ) -> list[torch.Tensor]:
        """float64 scores of each row's visible tokens."""
        exact = []
        for row, (position, stream) in enumerate(zip(positions, streams, strict=True)):
            dots = self.values[stream, : position + 1] @ queries[row].double().cpu().T * self.width**-0.5
            exact.append(dots.relu() @ weights[row].double().cpu() * self.heads**-0.5)
        return exact


def empty_on(device: torch.device) -> cuda_indexer.Empty:
    """Memory that is full of nonsense."""

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.full(shape, float("nan"), dtype=dtype, device=device)
        return torch.full(shape, -123456, dtype=dtype, device=device)

    return empty


def device_scores(
    cached: Cached, queries: torch.Tensor, weights: torch.Tensor, window: Window, context: int
) -> torch.Tensor:
    rows = cuda_indexer._Rows(queries, weights, window.positions, window.stream_of, window.positions, window.positions)
    scores = torch.full((len(rows), -(-context // PAGE) * PAGE), float("nan"), device=cached.device)
    module = driver.load(
        "indexer",
        {"HEADS": str(cached.heads), "WIDTH": str(cached.width), "KEYS": str(int(cached.kv is KvFormat.FP4X))},
    )
    cuda_indexer._score(module, rows, window.pages, cached.plane, scores, 0)
    return scores


def listed(selection: Selection, row: int) -> torch.Tensor:
    return selection.slots[row, : int(selection.counts[row])].long()


@pytest.mark.parametrize("kv", [KvFormat.BF16, KvFormat.FP4X])
@pytest.mark.parametrize(("heads", "width"), SIZES)
def test_scores_against_float64(heads: int, width: int, kv: KvFormat, device: torch.device) -> None:
    cached = Cached(heads, width, kv, (700, 300), device)
    positions, streams = [597, 598, 599, 600, 31, 32, 298, 299, 300, 301, 302], [0] * 4 + [1] * 7
    queries, weights = cached.rows(len(positions))
    got = device_scores(cached, queries, weights, cached.window(positions, streams), 768).cpu()
    for row, exact in enumerate(cached.scores(queries, weights, positions, streams)):
        assert got[row, len(exact) :].isnan().all()
        error = (got[row, : len(exact)].double() - exact).abs().max() / exact.abs().max()
        assert error < 1e-5


def test_eight_rows_over_a_hundred_pages(device: torch.device) -> None:
    """Blocks of six rows and of two, which take as much shared memory as a launch gets without asking for more."""
    cached = Cached(32, 128, KvFormat.BF16, (25_000, 25_000), device)
    positions, streams = list(range(24_990, 24_998)), [0] * 8
    queries, weights = cached.rows(8)
    got = device_scores(cached, queries, weights, cached.window(positions, streams), 25_088).cpu()
    for row, exact in enumerate(cached.scores(queries, weights, positions, streams)):
        assert float((got[row, : len(exact)].double() - exact).abs().max() / exact.abs().max()) < 1e-5


@pytest.mark.parametrize("kv", [KvFormat.BF16, KvFormat.FP4X])
def test_a_row_s_scores_and_list_are_the_same_in_every_window(kv: KvFormat, device: torch.device) -> None:
    cached = Cached(16, 32, kv, (900, 900), device)
    positions = [*range(880, 890), *range(20, 36)]
    streams = [0] * 10 + [1] * 16
    queries, weights = cached.rows(26)
    whole = device_scores(cached, queries, weights, cached.window(positions, streams), 1024)
    lists = cuda_indexer.select(
        queries, weights, cached.window(positions, streams), cached.plane, kv, 32, 1024, empty_on(device)
    )
    for rows in ([0], [3, 4], [9, 10], [25], list(range(5, 21)), list(range(1, 17)), list(range(11, 26))):
        window = cached.window([positions[r] for r in rows], [streams[r] for r in rows])
        part = device_scores(cached, queries[rows], weights[rows], window, 1024)
        assert torch.equal(part.nan_to_num(), whole[rows].nan_to_num())
        some = cuda_indexer.select(queries[rows], weights[rows], window, cached.plane, kv, 32, 960, empty_on(device))
        for i, row in enumerate(rows):
            assert torch.equal(listed(some, i), listed(lists, row))


def test_short_rows_take_everything_in_order(device: torch.device) -> None:
    cached = Cached(16, 32, KvFormat.BF16, (600, 600), device)
    queries, weights = cached.rows(3)
    window = cached.window([0, 299, 511], [1, 0, 1])
    for context in (512, 600):
        selection = cuda_indexer.select(
            queries, weights, window, cached.plane, KvFormat.BF16, 512, context, empty_on(device)
        )
        assert selection.counts.tolist() == [1, 300, 512]
        for row, (stream, visible) in enumerate([(1, 1), (0, 300), (1, 512)]):
            at = torch.arange(visible, device=device)
            want = cached.pages[stream, at // PAGE] * PAGE + at % PAGE
            assert torch.equal(listed(selection, row), want)


def rank(scores: torch.Tensor, positions: list[int], count: int, context: int) -> Selection:
    """Only the ranking, on given scores; slots are positions."""
    device = scores.device
    rows, stride = scores.shape
    empty = empty_on(device)
    pages = torch.arange(stride // PAGE, device=device)[None]
    at = torch.tensor(positions, device=device)
    none = torch.zeros(rows, 1, device=device)
    part = cuda_indexer._Rows(
        none, none, at, torch.zeros_like(at), empty((rows, count), torch.int32), empty((rows,), torch.int32)
    )
    parts = cuda_indexer._parts(context, count)
    levels = [(empty((rows, n * count), torch.int32), empty((rows, n * count), torch.int32)) for n in parts[:-1]]
    module = driver.load("indexer", {"HEADS": "16", "WIDTH": "32", "KEYS": "0"})
    cuda_indexer._rank(module, part, pages, parts, count, scores, levels)
    return Selection(part.slots, part.counts)


@pytest.mark.parametrize(
    ("visible", "count", "context"),
    [(2049, 2048, 2304), (16384, 2048, 16384), (16385, 2048, 20480), (40000, 2048, 65536), (150_000, 2048, 150_016),
     (3000, 32, 3072), (20000, 32, 33024)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["random", "ties", "zeros", "negative"])
def test_selection_is_the_total_order(visible: int, count: int, context: int, kind: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(visible)
    stride = -(-context // PAGE) * PAGE
    scores = torch.randn(2, stride, generator=generator)
    if kind == "ties":
        scores = (
            (scores * 2).round() / 2 * torch.tensor([1.0, -1.0])[torch.randint(0, 2, scores.shape, generator=generator)]
        )
    elif kind == "zeros":  # every score 0 of either sign, but for a few
        scores = torch.where(scores > 2.5, scores, 0.0 * scores)
    elif kind == "negative":
        scores = -scores.abs() - 1
    scores[:, visible:] = float("nan")
    selection = rank(scores.to(device), [visible - 1, visible - 1], count, context)
    for row in range(2):
        want = order.best(scores[row : row + 1, :visible], count)[0].sort().values
        assert torch.equal(listed(selection, row).cpu(), want)
