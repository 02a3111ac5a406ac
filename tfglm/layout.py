"""Who owns what when a model is spread over ranks: attention heads, expert columns, vocabulary rows.

Everything that cuts a tensor asks here: the loader, the memory plan and the kernels' launch shapes. A family is cut
into units that must stay whole; where they do not divide evenly, the first ranks of the list hold one unit more, and
for experts that list is rotated so that no rank holds the extra unit everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tfglm.errors import ConfigError

MAX_RANKS = 8


class Family(Enum):
    """What is cut, and along what: each share is a run of heads, columns or rows.

    HEADS: query heads (rows of q_b and kv_b, columns of o_proj). ROUTED, SHARED, DENSE: inner columns of the routed
    experts, the shared expert and the dense MLP (rows of gate and up, columns of down). VOCABULARY: rows of embedding
    and head.
    """

    HEADS = "heads"
    ROUTED = "routed"
    SHARED = "shared"
    DENSE = "dense"
    VOCABULARY = "vocabulary"


# A Hadamard block of EXL3 mixes 128 columns and cannot be computed in parts; 64 vocabulary rows are a row tile.
UNIT = {Family.HEADS: 1, Family.ROUTED: 128, Family.SHARED: 128, Family.DENSE: 128, Family.VOCABULARY: 64}


_CUTS = {
    "q_b_proj": (Family.HEADS, 0),
    "kv_b_proj": (Family.HEADS, 0),
    "o_proj": (Family.HEADS, 1),
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d"), (Family.HEADS, 0)),
    **dict.fromkeys(("f_b_proj", "g_b_proj", "b_proj"), (Family.HEADS, 0)),
    "embed_tokens": (Family.VOCABULARY, 0),
    "lm_head": (Family.VOCABULARY, 0),
}
_INNER_AXIS = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}


def cut_of(linear: str) -> tuple[Family, int] | None:
    """The family a matrix [outputs, inputs] is cut by and the axis of the cut; None for what every rank holds whole.

    linear: its name in the checkpoint, without ".weight".
    """
    last = linear.rpartition(".")[2]
    if last in _CUTS:
        return _CUTS[last]
    if last not in _INNER_AXIS:
        return None
    if ".experts." in linear:
        return Family.ROUTED, _INNER_AXIS[last]
    return (Family.SHARED if ".shared_experts." in linear else Family.DENSE), _INNER_AXIS[last]


class Placement(Enum):
    """Which rank holds the extra block of a routed expert.

    BY_LAYER: rank layer mod ranks for all experts of a layer; every matrix of a layer then has one shape.
    BY_EXPERT: rank (layer + expert) mod ranks, so that the experts of one step, which every rank must wait for, weigh
    nearly the same on all ranks.
    """

    BY_LAYER = "layer"
    BY_EXPERT = "expert"


PLACEMENT = Placement.BY_EXPERT
"""The one that models are loaded and planned with: on the slowest of three ranks the experts of GLM-5.3 take a tenth
less time than by layer (benchmarks/results/exl3_placement_h200.json)."""


def run_of(size: int, unit: int, ranks: int, rank: int, first_larger: int = 0) -> tuple[int, int]:
    """(start, stop) of a rank's part of `size` things that are cut between whole units only. first_larger: the first
    rank that holds a unit more than others, where they do not divide evenly."""
    each, extra = divmod(-(-size // unit), ranks)
    start = sum(each + ((r - first_larger) % ranks < extra) for r in range(rank))
    stop = start + each + ((rank - first_larger) % ranks < extra)
    return min(start * unit, size), min(stop * unit, size)


class Sizes(Protocol):
    """What of a model's configuration the cut is made of."""

    @property
    def num_attention_heads(self) -> int: ...
    @property
    def moe_intermediate_size(self) -> int: ...
    @property
    def n_shared_experts(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


@dataclass(frozen=True)
class Layout:
    """The cut of one model over `ranks` ranks (1 to 8). Sizes are in heads, columns and rows of the whole model.

    Raises ConfigError for a number of ranks out of range.
    """

    ranks: int
    heads: int
    routed_columns: int
    shared_columns: int
    dense_columns: int
    vocabulary: int
    placement: Placement = PLACEMENT

    def __post_init__(self) -> None:
        if not 1 <= self.ranks <= MAX_RANKS:
            raise ConfigError(f"a model can be spread over 1 to {MAX_RANKS} ranks; {self.ranks} were asked for")

    @classmethod
    def of(cls, config: Sizes, ranks: int, placement: Placement = PLACEMENT) -> Layout:
        """The cut of a model with these sizes."""
        return cls(
            ranks=ranks,
            heads=config.num_attention_heads,
            routed_columns=config.moe_intermediate_size,
            shared_columns=config.moe_intermediate_size * config.n_shared_experts,
            dense_columns=config.intermediate_size,
            vocabulary=config.vocab_size,
            placement=placement,
        )

    def size(self, family: Family) -> int:
        """How many heads, columns or rows the whole model has."""
        return {
            Family.HEADS: self.heads,
            Family.ROUTED: self.routed_columns,
            Family.SHARED: self.shared_columns,
            Family.DENSE: self.dense_columns,
            Family.VOCABULARY: self.vocabulary,
        }[family]

    def share(self, family: Family, layer: int, rank: int, expert: int = 0) -> tuple[int, int]:
        """(start, stop) of a rank's part. The shares of ranks 0, 1, .. follow each other and cover the family.

        layer: the checkpoint's layer number. expert: matters for ROUTED under BY_EXPERT only. A rank's share is empty
        where there are fewer units than ranks.
        """
        return run_of(self.size(family), UNIT[family], self.ranks, rank, self._rotation(family, layer, expert))

    def largest(self, family: Family) -> int:
        """The largest share of any rank in any layer: what a buffer must hold."""
        unit = UNIT[family]
        units = -(-self.size(family) // unit)
        return min(-(-units // self.ranks) * unit, self.size(family))

    def _rotation(self, family: Family, layer: int, expert: int) -> int:
        """The first rank that holds an extra unit. The shared expert's is one further than the layer's own."""
        if family is Family.ROUTED:
            return layer + (expert if self.placement is Placement.BY_EXPERT else 0)
        return layer + 1 if family is Family.SHARED else 0


_LAYER, _EXPERT = re.compile(r"\.layers\.(\d+)\."), re.compile(r"\.experts\.(\d+)\.")


@dataclass(frozen=True)
class Share:
    """One rank's part of a model."""

    layout: Layout
    rank: int

    def part(self, linear: str, shape: Sequence[int]) -> tuple[slice, slice]:
        """The rows and columns that the rank holds of a matrix [outputs, inputs] by its name without ".weight": all of
        what is not cut, and an empty slice where its share is empty."""
        parts = [slice(0, shape[0]), slice(0, shape[1])]
        if (cut := cut_of(linear)) is not None:
            family, axis = cut
            layer, expert = (int(found.group(1)) if (found := p.search(linear)) else 0 for p in (_LAYER, _EXPERT))
            start, stop = self.layout.share(family, layer, self.rank, expert)
            unit = shape[axis] // self.layout.size(family) if family is Family.HEADS else 1
            parts[axis] = slice(start * unit, stop * unit)
        return parts[0], parts[1]
