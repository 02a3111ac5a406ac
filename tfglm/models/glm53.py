"""GLM-5.3 (`glm_moe_dsa`): the forward pass over a window of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from tfglm.cache.latent import Cache, LatentCache
from tfglm.cache.pages import Stream
from tfglm.cache.sizes import FLOAT32
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import MemoryShortError
from tfglm.formats.latent import KvFormat
from tfglm.layout import PLACEMENT, Layout, Share
from tfglm.models import mla, moe
from tfglm.models.context import dealt_out
from tfglm.models.shapes import shapes_of
from tfglm.models.split import Vocabulary
from tfglm.models.taps import Passed, Taps
from tfglm.models.weights import ModelWeights
from tfglm.models.window import LaidOut, Rows, appended, from_message, to_message
from tfglm.ops.base import Ops
from tfglm.ops.group import Alone, Group, Message, together
from tfglm.ops.reference import ReferenceOps
from tfglm.ops.rows import Rows as RowMath

FORWARD = "forward"
"""The kind of message that announces a forward pass."""

Handler = Callable[[Message], None]


class Glm53:
    """The model and its cache. One thread at a time.

    tokens: how many tokens the cache holds over all streams, rounded up to whole pages. kv: the cache's format. group:
    the ranks that the weights are spread over. Rank 0's model is used as if it were alone; the others only follow it,
    with caches of their own that become the same. cp: the caches are dealt out to the ranks instead (models/context.py)
    and `tokens` are those that this rank's has room for.
    """

    placement = PLACEMENT
    """Of the routed experts' columns on the ranks."""
    followed: Passed | None = None
    """On a rank other than 0: what the last forward tapped, for what follows it there."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        tokens: int,
        kv: str = "bf16",
        ops: Ops | None = None,
        group: Group | None = None,
        cp: bool = False,
    ) -> None:
        self.config = config
        self.weights = weights
        self.group: Group = group or Alone()
        self.vocabulary = Vocabulary.of(config, self.group)
        self.cache: Cache = LatentCache(config, tokens, kv, self.group.ranks if cp else 1)
        self.dealt = dealt_out(config, self.group, self.cache.pool) if cp else None
        self.ops = ops or ReferenceOps(RowMath.verified(shapes_of(config)), packed_format(kv))
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self.frequencies = 1.0 / config.rope_theta**half

    @property
    def decodes_alike(self) -> bool:
        """Whether a row that is decoded has the bits that it has when it is read as a part of a prompt. Where it has
        not, no prompt may go on from rows that a reply has cached."""
        return self.dealt is None

    @property
    def share(self) -> Share:
        """The part of the checkpoint that this rank holds."""
        return Share(Layout.of(self.config, self.group.ranks, self.placement), self.group.rank)

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.cache.pool.page_tokens

    @property
    def tokens_total(self) -> int:
        return self.cache.pool.pages * self.page_tokens

    @property
    def tokens_free(self) -> int:
        return self.cache.pool.free * self.page_tokens

    def prepare(self, rows: int, window: int, taps: Taps) -> None:
        """Do now what the first decode windows of up to `rows` rows, in streams of up to `window` tokens, would wait
        for. Called before anything is read; there may be nothing to do."""

    def close(self) -> None:
        """Give back what the group's wire is part of, so that it can be closed. Nothing may run any more."""

    def open_stream(self) -> Stream:
        """An empty stream. Raises MemoryShortError when no page is free."""
        if not self.cache.pool.free:
            raise MemoryShortError(
                f"the cache is full: all of its {self.tokens_total} tokens are held by other streams"
            )
        return Stream(self.cache.pool)

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        """Append every entry's tokens to its stream; the wanted rows' logits, in order: float32 [sum of want,
        vocab_size].

        Bits of a row depend on its stream's tokens up to it and on nothing else: not on the rows beside it nor on how
        the tokens before it were cut into windows. Raises ValueError for rows that cannot be read and
        MemoryShortError for a full cache; whatever is raised, the streams are as before.
        """
        return self.forward_tapped(window, Taps()).logits

    @torch.inference_mode()
    def forward_tapped(self, window: Sequence[Rows], taps: Taps) -> Passed:
        """`forward` that also hands out what `taps` asks for, of every row of the window."""
        with self._announced(window, taps) as rows:
            return self._forward(rows, taps)

    @contextmanager
    def _announced(self, window: Sequence[Rows], taps: Taps) -> Iterator[LaidOut]:
        """The rows laid out for a forward pass that every other rank was told to join."""
        torch.get_num_threads()  # a new thread's BLAS runs with the process's default thread count until torch is asked
        with (
            appended(window, self.cache.pool, self.config) as rows,
            together(self.group, to_message(FORWARD, rows, taps.facts())),
        ):
            yield rows

    def handlers(self) -> Mapping[str, Handler]:
        """A rank other than 0: its part of what rank 0 announces, by the kind of message."""
        return {FORWARD: self.follow_forward}

    @torch.inference_mode()
    def follow_forward(self, message: Message) -> None:
        """A rank other than 0: its part of the forward pass that rank 0 announced."""
        torch.get_num_threads()
        self.followed = self._forward(from_message(message), Taps.of(message))

    def _forward(self, rows: LaidOut, taps: Taps) -> Passed:
        ops, config, weights = self.ops, self.config, self.weights
        dealt = self.dealt.window(rows) if self.dealt else None
        window = dealt.window if dealt else rows.window
        rope = ops.angles(window.positions, self.frequencies)
        x = self.vocabulary.embed(ops, weights.embed, rows.tokens)
        selection = None
        branch = torch.zeros_like(x)
        streams = {}
        for number, (layer, planes) in enumerate(zip(weights.layers, self.cache.layers, strict=True)):
            x, h = ops.add_rms_norm(x, branch, layer.attention_norm, config.rms_norm_eps)
            if number in taps.layers:
                streams[number] = x
            part, selection = mla.attention(ops, config, layer.attention, h, rope, window, planes, selection, dealt)
            branch = self.group.sum(part)
            x, h = ops.add_rms_norm(x, branch, layer.ffn_norm, config.rms_norm_eps)
            branch = self.group.sum(moe.feed_forward(ops, config, layer.ffn, h))
        if not taps:
            _, h = ops.add_rms_norm(x[rows.wanted], branch[rows.wanted], weights.norm, config.rms_norm_eps)
            return Passed(self.vocabulary.logits(ops, weights.head, h), None, streams)
        x, h = ops.add_rms_norm(x, branch, weights.norm, config.rms_norm_eps)
        if config.num_hidden_layers in taps.layers:
            streams[config.num_hidden_layers] = x
        logits = self.vocabulary.logits(ops, weights.head, h[rows.wanted])
        return Passed(logits, h if taps.normed else None, streams)


def packed_format(kv: str) -> KvFormat | None:
    """The format of a CPU's cache rows if they are bytes; bfloat16 and float32 it holds as numbers."""
    return None if kv in ("bf16", FLOAT32) else KvFormat(kv)
