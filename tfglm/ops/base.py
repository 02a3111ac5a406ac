"""What the forward pass asks of a device: one interface, an implementation for each.

Shapes: R rows of a window, H attention heads, C = kv_lora_rank (the latent), D = qk_rope_head_dim. Activations are
float32 on the reference path. Every operation gives a row bits that depend on nothing but that row, its position and
the caches.

Cache planes are [pages, PAGE, width] tensors of the cache's dtype; a slot is page * PAGE + offset.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.ops.exl3_weights import Exl3Experts, Weight


@dataclass(frozen=True)
class Span:
    """The rows of one stream in a window: rows start..stop-1, at positions position.. of the stream."""

    start: int
    stop: int
    position: int


@dataclass(frozen=True)
class Window:
    """Where the R rows of one forward lie. int64 tensors.

    positions [R]: absolute, from 0. slots [R]: where each row's own token is cached. pages [streams, P]: page numbers
    of each stream in order, padded with 0. stream_of [R]: the row of `pages`. spans: the same on the host, one a
    stream.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    pages: torch.Tensor
    stream_of: torch.Tensor
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Rope:
    """cos and sin [R, D/2] of each row's position."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class Selection:
    """The tokens each row attends to: slots [R, L] in ascending position, of which the first counts[r] are valid.

    Entries past counts[r] name a slot that has been written, so that reading it is harmless.
    """

    slots: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class Part:
    """Attention over some of the tokens of each row's choice, to be added to that over the others. out [R, H, C]
    float32: normalised by itself. peak and total [R, H] float32: the log-sum-exp of the scores is peak + ln(total).
    Over no tokens out and total are 0 and peak is -inf."""

    out: torch.Tensor
    peak: torch.Tensor
    total: torch.Tensor


@dataclass(frozen=True)
class Routing:
    """experts [R, k] int64, best choice first, and their weights [R, k] float32."""

    experts: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class PlainExperts:
    """The routed experts of one layer as plain matrices: gate_up [E, 2I, hidden] (gate rows first), down [E, hidden,
    I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


Experts = PlainExperts | Exl3Experts
"""Every format in which a layer's routed experts may be held; `Ops.experts` handles each."""


class Ops(Protocol):
    """The operations of one device."""

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of table [vocab, hidden] for tokens [R]: [R, hidden]."""
        ...

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor) -> Rope:
        """Rotary angles: positions [R], frequencies [D/2] float32."""
        ...

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """x [R, ..., width]: the adjacent pairs (x[2i], x[2i+1]) of its first D values rotated, the results laid out as
        halves; the other values as they are."""
        ...

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """x [R, inputs] through a weight of that many inputs: [R, outputs]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [R, D] over its root mean square, times weight [D]."""
        ...

    def add_rms_norm(
        self, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream x + branch, and its rms_norm."""
        ...

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [R, 2I] (gate first): [R, I]."""
        ...

    def split_latents(
        self, a: torch.Tensor, q_norm: torch.Tensor, latent_norm: torch.Tensor, eps: float, rope: Rope, window: Window,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Of a [R, Q + C + D], the first Q values normalised by q_norm [Q]: [R, Q].

        The rest is cached: C values normalised by latent_norm [C], D rotated.
        """
        ...

    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        """Cache key [R, index_head_dim] after LayerNorm, its first D values rotated."""
        ...

    def select(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, plane: torch.Tensor, count: int
    ) -> Selection:
        """The `count` best-scoring tokens up to each row's own, all of them where there are no more.

        queries [R, index heads, index_head_dim] rotated, head_weights [R, index heads], both unscaled. The score of
        token t is the sum over heads of head_weight * heads^-0.5 * relu(query . key_t * index_head_dim^-0.5). Ties go
        to the lower position.
        """
        ...

    def best_keys(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, visible: torch.Tensor,
        plane: torch.Tensor, count: int, first: int, step: int,
    ) -> torch.Tensor:  # fmt: skip
        """As `select` scores, where only every step-th token of a stream is cached here, beginning with `first`:
        visible [R] of them are up to each row's own. The keys (ops.order) of the `count` best by their positions in
        the whole stream, int64 [R, count] in any order, order.NO_KEY where there are fewer."""
        ...

    def attend_part(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> Part:  # fmt: skip
        """`attend` over lists that may be empty, and what is needed to add it to others."""
        ...

    def absorb(self, queries: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
        """Queries [R, H, nope] into the latent space by key_up [H, nope, C]: [R, H, C]."""
        ...

    def attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> torch.Tensor:  # fmt: skip
        """Softmax attention of latent_queries [R, H, C] and rope_queries [R, H, D] over the selected tokens: [R, H, C].

        rope_queries come unrotated; rope is theirs.
        """
        ...

    def expand(self, attended: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
        """Attended latents [R, H, C] into values by value_up [H, V, C]: [R, H * V]."""
        ...

    def route(self, x: torch.Tensor, gate: torch.Tensor, correction: torch.Tensor, config: ModelConfig) -> Routing:
        """Choose experts for x [R, hidden] by sigmoid(gate . x) + correction [E]; weights from the sigmoid alone."""
        ...

    def experts(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weighted sum of each row's experts, added in the order of choice, and last `shared`: [R, hidden]."""
        ...
