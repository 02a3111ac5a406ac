"""Arithmetic on a CPU whose result for a row is a function of that row alone, bit for bit.

A BLAS picks its kernel, and so the order of its sums, by the shape of the product and by how it is shared between
threads; a row multiplied alone, in a window of nine or in a prompt chunk then differs in the last bits, and a drafted
reply may differ from a serial one. Hence:

- Weights are multiplied in blocks of fixed size: TILE rows, zero-padded, by so many columns. One shape, one kernel.
- Blocks go to the BLAS as a batch of at least as many products as there are threads, so that none is shared between
  threads; and of two at least, because a single product is treated apart.
- A block has MIN_COLUMNS columns at least: below that, kernels differ by the row's place in the tile.
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
_MAX_COLUMNS = 128
_PIECE_ELEMENTS = 1 << 22
"""Weights become float32 in pieces of about this many elements (16 MiB), which the allocator can use again."""
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
    """Row-invariant products and functions of float32 rows, for the number of threads set when it is made.

    alone: every row by itself instead of in tiles.
    """

    def __init__(self, *, alone: bool = False) -> None:
        self.alone = alone
        self.batch = max(2, torch.get_num_threads())

    @classmethod
    def verified(cls, shapes: Shapes) -> Rows:
        """Rows in tiles if this machine's kernels keep the promise for `shapes`, else alone, with a warning."""
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
        outputs, inputs = weight.shape
        if not len(x):
            return x.new_empty(0, outputs)
        tiles, columns = self._tiles(x), self._block_columns(outputs)
        piece = max(1, _PIECE_ELEMENTS // (columns * inputs)) * columns
        pieces = weight.split(piece) if outputs > piece else (weight,)
        products = [self._tiles_by_blocks(tiles, _blocks(part, columns)) for part in pieces]
        return (products[0] if len(products) == 1 else torch.cat(products, dim=1))[: x.shape[0], :outputs]

    def grouped(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [R, groups, inputs] times the group's own weight [groups, outputs, inputs]: [R, groups, outputs]."""
        rows, groups, inputs = x.shape
        outputs = weight.shape[1]
        blocks = _blocks(weight, self._block_columns(outputs))
        matrices = blocks.flatten(0, 1).transpose(1, 2)  # [groups * blocks, inputs, columns]
        products = []
        for tile in self._tiles(x.reshape(rows, -1)):
            own = tile.view(-1, groups, 1, inputs).permute(1, 2, 0, 3).expand(-1, blocks.shape[1], -1, -1)
            product = self._products(own.flatten(0, 1), matrices)  # [groups * blocks, rows of a tile, columns]
            products.append(product.unflatten(0, (groups, -1)).permute(2, 0, 1, 3).flatten(2))
        return (products[0] if len(products) == 1 else torch.cat(products))[:rows, :, :outputs]

    def batched(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [R, M, K] times b [R, K, N], each of the R products belonging to one row of the window."""
        return self._products(a, b)

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

    def _products(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a [B, M, K] times b [B, K, N]: B products, each with the same bits however many there are."""
        if self.alone:
            return torch.stack([torch.mm(x, y) for x, y in zip(a, b, strict=True)])
        count = a.shape[0]
        if count == 1:
            a, b = a.expand(self.batch, -1, -1), b.expand(self.batch, -1, -1)
        elif count < self.batch:
            spare = (0, 0, 0, 0, 0, self.batch - count)
            a, b = torch.constant_pad_nd(a, spare), torch.constant_pad_nd(b, spare)
        return torch.bmm(a, b)[:count]

    def _tiles(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] as [tiles, TILE, K], zero rows at the end; alone: [R, 1, K]."""
        tile = 1 if self.alone else TILE
        return torch.constant_pad_nd(x, (0, 0, 0, -x.shape[0] % tile)).view(-1, tile, x.shape[1])

    def _block_columns(self, outputs: int) -> int:
        """How many columns of a weight go into a block: so few that every thread gets one, if there are that many."""
        share = -(-outputs // self.batch)
        return min(_MAX_COLUMNS, -(-share // MIN_COLUMNS) * MIN_COLUMNS)

    def _tiles_by_blocks(self, tiles: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """tiles [T, rows, K] times blocks [B, columns, K] transposed: [T * rows, B * columns]."""
        matrices = blocks.transpose(1, 2)
        if tiles.shape[0] < blocks.shape[0]:
            by_tile = [self._products(tile.expand(blocks.shape[0], -1, -1), matrices) for tile in tiles]
            product = torch.stack(by_tile)
        else:
            by_block = [self._products(tiles, matrix.expand(tiles.shape[0], -1, -1)) for matrix in matrices]
            product = torch.stack(by_block, dim=1)
        return product.transpose(1, 2).flatten(2).flatten(0, 1)


def broken_shapes(rows: Rows, shapes: Shapes) -> list[str]:
    """In words, each of `shapes` for which a row's bits depend on its place or its neighbours."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    def capped(linears: frozenset[tuple[int, int]]) -> list[tuple[int, int]]:
        """A wide weight is multiplied in the same blocks as one that has just enough of them for every thread."""
        return sorted({(k, min(n, _MAX_COLUMNS * rows.batch)) for k, n in linears})

    trials: list[_Trial] = []
    for k, n in capped(shapes.linears):
        trials.append(_Trial(f"a linear {k} -> {n}", partial(rows.linear, weight=normal(n, k)), normal(k), k * n))
    for k, n in capped(shapes.experts):
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


def _blocks(weight: torch.Tensor, columns: int) -> torch.Tensor:
    """weight [..., outputs, inputs] as float32 [..., blocks, columns, inputs], zero rows at the end."""
    outputs = weight.shape[-2]
    weight = weight.contiguous().float()
    if outputs % columns:
        weight = torch.constant_pad_nd(weight, (0, 0, 0, -outputs % columns))
    return weight.unflatten(-2, (-1, columns))
