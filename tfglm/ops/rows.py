"""Arithmetic on a CPU whose result for a row is a function of that row alone, bit for bit.

A BLAS picks its kernel, and so the order of its sums, by the shape of the product; a row multiplied alone, in a
window of nine or in a prompt chunk then differs in the last bits, and a drafted reply may differ from a serial one.
Hence:

- `linear` and `grouped` always multiply tiles of exactly TILE rows, zero-padded. One shape, one kernel.
- `batched` multiplies matrices that belong to one row each; a batch of one is padded to two, because BLAS libraries
  treat a single product apart and a larger batch not.
- A product with fewer than MIN_COLUMNS columns is widened: below that, kernels differ by the row's place in the tile.
- sigmoid and silu are composed of exp, + and /: torch's own treat the last elements of a tensor apart, its exp does
  not.

None of this is promised by a BLAS, so `Rows.verified` tries the very shapes a model uses and falls back to one row a
product (slow, right by construction) where it does not hold.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import layer_norm, rms_norm

log = logging.getLogger(__name__)

RowFunction = Callable[[torch.Tensor], torch.Tensor]

TILE = 8
"""Rows a product: a decode window wastes at most seven, and prompts lose little against wider tiles."""
MIN_COLUMNS = 16
_BLOCK_ELEMENTS = 1 << 22
"""Weights become float32 in blocks of at most this many elements (16 MiB), which the allocator can use again."""
_TRIAL_WORK = 1 << 26
"""Multiplications a trial may take, where the fewest rows that show anything do not need more."""


@dataclass(frozen=True)
class Shapes:
    """What a model multiplies and normalises, for `Rows.verified`.

    linears: (inputs, outputs). experts: the same, of matrices that go as linears or in groups of any number.
    groups: (groups, inputs, outputs). scores, sums: (rows, inner, columns) of `batched` by matrices that lie as
    [columns, inner] and as [inner, columns]. shared: as scores, with one matrix for all rows. widths: of exp, cos, sin,
    softmax and norms.
    """

    linears: frozenset[tuple[int, int]] = frozenset()
    experts: frozenset[tuple[int, int]] = frozenset()
    groups: frozenset[tuple[int, int, int]] = frozenset()
    scores: frozenset[tuple[int, int, int]] = frozenset()
    sums: frozenset[tuple[int, int, int]] = frozenset()
    shared: frozenset[tuple[int, int, int]] = frozenset()
    widths: frozenset[int] = frozenset()


class Rows:
    """Row-invariant products and functions of float32 rows. alone: every row by itself instead of in tiles."""

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone

    @classmethod
    def verified(cls, shapes: Shapes) -> Rows:
        """Rows in tiles if this machine's kernels keep the promise for `shapes`, else alone, with a warning.

        The answer holds for the number of threads set at the time of the call.
        """
        broken = broken_shapes(cls(), shapes)
        if not broken:
            return cls()
        log.warning(
            "W_ROWS: with %d threads on this machine a row's bits depend on its neighbours in %s; multiplying rows one "
            "by one instead, several times slower on prompts",
            torch.get_num_threads(),
            ", ".join(broken[:3]) + (f" and {len(broken) - 3} more" if len(broken) > 3 else ""),
        )
        return cls(alone=True)

    def linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [R, inputs] times weight [outputs, inputs] of any float dtype, transposed: [R, outputs]."""
        tiles, block = self._tiles(x), _block_rows(weight.shape[1])
        if weight.shape[0] <= block:
            product = self._tile_products(tiles, weight)
        else:
            product = torch.cat([self._tile_products(tiles, part) for part in weight.split(block)], dim=2)
        return product.flatten(0, 1)[: x.shape[0], : weight.shape[0]]

    def grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [R, groups, inputs] times the group's own weight [groups, outputs, inputs]: [R, groups, outputs]."""
        rows, groups, inputs = x.shape
        matrices = _widened(weight.float()).transpose(1, 2)
        tiles = self._tiles(x.reshape(rows, -1))
        tiles = tiles.view(*tiles.shape[:2], groups, inputs).transpose(1, 2).contiguous()
        products = [torch.bmm(tile, matrices).transpose(0, 1) for tile in tiles]
        product = products[0] if len(products) == 1 else torch.cat(products)
        return product[:rows, :, : weight.shape[1]]

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [R, M, K] times b [R, K, N], each of the R products belonging to one row of the window."""
        if self.alone:
            return torch.stack([torch.mm(x, y) for x, y in zip(a, b, strict=True)])
        if a.shape[0] == 1:
            return torch.bmm(a.expand(2, -1, -1), b.expand(2, -1, -1))[:1]
        return torch.bmm(a, b)

    def each(self, function: RowFunction, x: torch.Tensor) -> torch.Tensor:
        """function of x [R, ...], which treats rows apart and keeps their number."""
        return torch.cat([function(row) for row in x.split(1)]) if self.alone else function(x)

    def sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return 1 / (1 + self.each(torch.exp, -x))

    def silu(self, x: torch.Tensor) -> torch.Tensor:
        return x / (1 + self.each(torch.exp, -x))

    def softmax(self, x: torch.Tensor) -> torch.Tensor:
        return self.each(lambda part: torch.softmax(part, dim=-1), x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return self.each(lambda part: rms_norm(part, x.shape[-1:], weight, eps), x)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return self.each(lambda part: layer_norm(part, x.shape[-1:], weight, bias, eps), x)

    def _tiles(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] as [tiles, TILE, K], zero rows at the end; alone: [R, 1, K]."""
        tile = 1 if self.alone else TILE
        return torch.constant_pad_nd(x, (0, 0, 0, -x.shape[0] % tile)).view(-1, tile, x.shape[1])

    def _tile_products(self, tiles: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[tiles, rows, K] times [N, K] transposed. Two and more tiles go as a batch: same bits, better threaded."""
        matrix = _widened(weight.float()).t()
        if tiles.shape[0] == 1:
            return torch.mm(tiles[0], matrix)[None]
        if self.alone:
            return torch.stack([torch.mm(tile, matrix) for tile in tiles])
        return torch.bmm(tiles, matrix.expand(tiles.shape[0], -1, -1))


def broken_shapes(rows: Rows, shapes: Shapes) -> list[str]:
    """In words, each of `shapes` for which a row's bits depend on its place or its neighbours."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    trials: list[_Trial] = []
    for k, n in sorted(_blocks(shapes.linears)):
        trials.append(_Trial(f"a linear {k} -> {n}", partial(rows.linear, weight=normal(n, k)), normal(k), k * n))
    for k, n in sorted(shapes.experts):
        trials.append(_Trial(f"experts {k} -> {n}", partial(_in_groups, rows, normal(n, k)), normal(k), 4 * k * n))
    for g, k, n in sorted(shapes.groups):
        heads = partial(rows.grouped, weight=normal(g, n, k))
        trials.append(_Trial(f"{g} heads {k} -> {n}", heads, normal(g, k), g * k * n))
    for kind, products in (("scores", shapes.scores), ("sums", shapes.sums)):
        for m, k, n in sorted(products):
            product = partial(_own_matrix, rows, (m, k, n), kind == "scores")
            trials.append(_Trial(f"{kind} {[m, k, n]}", product, normal(m * k + k * n), m * k * n))
    for m, k, n in sorted(shapes.shared):
        product = partial(_one_matrix, rows, normal(n, k).t())
        trials.append(_Trial(f"index scores {[m, k, n]}", product, normal(m, k), m * k * n))
    for width in sorted(shapes.widths):
        weight, bias, row = normal(width), normal(width), normal(width)
        layer_norm = partial(rows.layer_norm, weight=weight, bias=bias, eps=1e-6)
        trials += [
            _Trial(f"cos of width {width}", partial(rows.each, torch.cos), row, width),
            _Trial(f"sin of width {width}", partial(rows.each, torch.sin), row, width),
            _Trial(f"silu of width {width}", rows.silu, row, width),
            _Trial(f"softmax of width {width}", rows.softmax, row, width),
            _Trial(f"rms_norm of width {width}", partial(rows.rms_norm, weight=weight, eps=1e-6), row, width),
            _Trial(f"layer_norm of width {width}", layer_norm, row, width),
        ]
    return [trial.name for trial in trials if not trial.invariant()]


@dataclass(frozen=True)
class _Trial:
    """A function of rows, one row to give it, and the multiplications that row costs."""

    name: str
    function: RowFunction
    row: torch.Tensor
    work: int

    def invariant(self) -> bool:
        """Whether the function gives the row the same bits alone, at every place of a window, and among other rows."""
        rows = max(TILE + 3, min(32 * TILE + 3, _TRIAL_WORK // self.work))
        alone = self.function(self.row[None])[0]
        copies = self.function(self.row.expand(rows, *self.row.shape).contiguous())
        mixed = torch.randn((rows, *self.row.shape), generator=torch.Generator().manual_seed(1))
        places = [0, rows // 2, rows - 1]
        mixed[places] = self.row
        return bool((copies == alone).all()) and bool((self.function(mixed)[places] == alone).all())


def _in_groups(rows: Rows, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x through weight in the ways an expert may be multiplied; NaN where they disagree."""
    pair = rows.grouped(x[:, None].expand(-1, 2, -1), weight.expand(2, -1, -1))
    single = rows.grouped(x[:, None], weight[None])
    ways = torch.cat([pair, single, rows.linear(x, weight)[:, None]], dim=1)
    return torch.where(ways == ways[:, :1], ways, float("nan"))


def _own_matrix(rows: Rows, shape: tuple[int, int, int], transposed: bool, x: torch.Tensor) -> torch.Tensor:
    m, k, n = shape
    a, b = x.split([m * k, k * n], dim=1)
    return rows.batched(a.reshape(-1, m, k), b.reshape(-1, n, k).transpose(1, 2) if transposed else b.reshape(-1, k, n))


def _one_matrix(rows: Rows, matrix: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return rows.batched(x, matrix.expand(x.shape[0], -1, -1))


def _block_rows(inputs: int) -> int:
    return max(1, _BLOCK_ELEMENTS // inputs // MIN_COLUMNS) * MIN_COLUMNS


def _blocks(linears: frozenset[tuple[int, int]]) -> set[tuple[int, int]]:
    """The products that `Rows.linear` makes of these weights."""
    blocks = set()
    for inputs, outputs in linears:
        parts = torch.empty(outputs, inputs, device="meta").split(_block_rows(inputs))
        blocks |= {(inputs, parts[0].shape[0]), (inputs, parts[-1].shape[0])}
    return blocks


def _widened(weight: torch.Tensor) -> torch.Tensor:
    """weight [..., outputs, inputs] with zero rows up to MIN_COLUMNS outputs."""
    missing = MIN_COLUMNS - weight.shape[-2]
    return weight if missing <= 0 else torch.constant_pad_nd(weight, (0, 0, 0, missing))
