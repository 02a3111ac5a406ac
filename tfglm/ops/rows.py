"""Arithmetic on a CPU whose result for a row is a function of that row alone, bit for bit.

A BLAS picks its kernel, and so the order of its sums, by the shape of the product; a row multiplied alone, in a
window of nine or in a prompt chunk then differs in the last bits, and a drafted reply may differ from a serial one.
Hence:

- `linear` and `per_head` always multiply tiles of exactly TILE rows, zero-padded. One shape, one kernel.
- `batched` multiplies matrices that belong to one row each; a batch of one is padded to two, because BLAS libraries
  treat a single product apart and a larger batch not.
- A product with fewer than TILE columns is widened to TILE: below that, kernels differ by the row's place in the tile.
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

log = logging.getLogger(__name__)

RowFunction = Callable[[torch.Tensor], torch.Tensor]

TILE = 16
_BLOCK_ELEMENTS = 1 << 22
"""Weights become float32 in blocks of at most this many elements (16 MiB), which the allocator can use again."""


@dataclass(frozen=True)
class Shapes:
    """What a model multiplies and normalises, for `Rows.verified`.

    linears: (inputs, outputs). heads: (heads, inputs, outputs). batches: (rows, inner, columns). widths: of exp,
    softmax and norms.
    """

    linears: frozenset[tuple[int, int]] = frozenset()
    heads: frozenset[tuple[int, int, int]] = frozenset()
    batches: frozenset[tuple[int, int, int]] = frozenset()
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
        tiles = self._tiles(x)
        parts = []
        for block in weight.split(_block_rows(weight)):
            product = self._tile_products(tiles, _widened(block.float()).t())
            parts.append(product.flatten(0, 1)[: x.shape[0], : block.shape[0]])
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def per_head(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [R, heads, inputs] times the head's own weight [heads, inputs, outputs]: [R, heads, outputs]."""
        rows, heads, inputs = x.shape
        matrices = weight.float()
        tiles = self._tiles(x.reshape(rows, heads * inputs)).unflatten(2, (heads, inputs)).transpose(1, 2).contiguous()
        return torch.cat([torch.bmm(tile, matrices).transpose(0, 1) for tile in tiles])[:rows]

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

    def mean_square(self, x: torch.Tensor) -> torch.Tensor:
        """[R, D] -> [R, 1]"""
        return self.each(lambda part: part.square().mean(dim=-1, keepdim=True), x)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return self.each(lambda part: torch.nn.functional.layer_norm(part, x.shape[-1:], weight, bias, eps), x)

    def _tiles(self, x: torch.Tensor) -> torch.Tensor:
        """x [R, K] as [tiles, TILE, K], zero rows at the end; alone: [R, 1, K]."""
        rows, inner = x.shape
        if self.alone:
            return x.unsqueeze(1)
        padded = -(-rows // TILE) * TILE
        if padded != rows:
            x, given = x.new_zeros(padded, inner), x
            x[:rows] = given
        return x.reshape(-1, TILE, inner)

    def _tile_products(self, tiles: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
        """[tiles, rows, K] times [K, N]. Two and more tiles go as a batch: same bits as one by one, better threaded."""
        if self.alone or tiles.shape[0] == 1:
            return torch.stack([torch.mm(tile, matrix) for tile in tiles])
        return torch.bmm(tiles, matrix.expand(tiles.shape[0], -1, -1))


def broken_shapes(rows: Rows, shapes: Shapes) -> list[str]:
    """In words, each of `shapes` for which a row's bits depend on its place or its neighbours. Milliseconds a shape."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    trials: dict[str, tuple[RowFunction, torch.Tensor]] = {}
    for inputs, outputs in sorted(_block_shapes(shapes.linears)):
        weight = normal(outputs, inputs)
        trials[f"a linear of {inputs} inputs and {outputs} outputs"] = (
            partial(rows.linear, weight=weight),
            normal(inputs),
        )
    for heads, inputs, outputs in sorted(shapes.heads):
        weight = normal(heads, inputs, outputs)
        trials[f"{heads} heads of {inputs} inputs and {outputs} outputs"] = (
            partial(rows.per_head, weight=weight),
            normal(heads, inputs),
        )
    for m, k, n in sorted(shapes.batches):
        trials[f"a batch of [{m}, {k}] x [{k}, {n}]"] = partial(_split_product, rows, m, k, n), normal(m * k + k * n)
    for width in sorted(shapes.widths):
        norm = partial(rows.layer_norm, weight=normal(width), bias=normal(width), eps=1e-6)
        trials[f"layer_norm of width {width}"] = norm, normal(width)
        for function in (rows.silu, rows.softmax, rows.mean_square):
            trials[f"{function.__name__} of width {width}"] = function, normal(width)
    return [name for name, (function, row) in trials.items() if not _invariant(function, row)]


def _invariant(function: RowFunction, row: torch.Tensor) -> bool:
    """Whether function gives `row` the same bits alone, at every place of a window, and among other rows."""
    rows = 2 * TILE + 3
    alone = function(row[None])[0]
    copies = function(row.expand(rows, *row.shape).contiguous())
    mixed = torch.randn((rows, *row.shape), generator=torch.Generator().manual_seed(1))
    places = [0, TILE // 2 - 1, TILE - 1, TILE, rows - 1]
    mixed[places] = row
    return bool((copies == alone).all()) and bool((function(mixed)[places] == alone).all())


def _split_product(rows: Rows, m: int, k: int, n: int, x: torch.Tensor) -> torch.Tensor:
    a, b = x.split([m * k, k * n], dim=1)
    return rows.batched(a.reshape(-1, m, k), b.reshape(-1, n, k).transpose(1, 2))


def _block_rows(weight: torch.Tensor) -> int:
    return max(TILE, _BLOCK_ELEMENTS // weight.shape[1] // TILE * TILE)


def _block_shapes(linears: frozenset[tuple[int, int]]) -> set[tuple[int, int]]:
    """The products that `Rows.linear` splits these weights into."""
    weights = [torch.empty(outputs, inputs, device="meta") for inputs, outputs in linears]
    return {
        (b.shape[1], b.shape[0]) for w in weights for b in (*w.split(_block_rows(w))[:1], w.split(_block_rows(w))[-1])
    }


def _widened(block: torch.Tensor) -> torch.Tensor:
    """block [outputs, inputs] with zero rows up to TILE."""
    missing = TILE - block.shape[0]
    return block if missing <= 0 else torch.cat([block, block.new_zeros(missing, block.shape[1])])
