"""GLM-5.3 on an NVIDIA GPU: the same forward pass, with its small windows captured in CUDA graphs.

A decode window of up to 16 rows is replayed from a graph of its own (rows, context) kind. Contexts are rounded up to
powers of two, which sizes launches but changes no result; graph and eager forward give the same bits. Tokens can be
drawn on the device (ops.draw), so that a row's 154,880 logits need not come to the host.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import product

import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE, PagePool, pages_for
from tfglm.cache.sizes import layer_bytes, trunk_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.formats.latent import KvFormat
from tfglm.models.context import dealt_out
from tfglm.models.glm53 import Glm53, Handler
from tfglm.models.graphs_cuda import GRAPH_ROWS, Captured, Graphs, context_kind, context_kinds
from tfglm.models.source import Source
from tfglm.models.split import Vocabulary
from tfglm.models.taps import Passed, Taps
from tfglm.models.weights import (
    AttentionWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
    MoeWeights,
    load_embedding,
    load_layer,
)
from tfglm.models.window import LaidOut, Rows, appended, from_message, to_message
from tfglm.ops.base import PlainExperts, Window
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.cuda_sample import Sampler
from tfglm.ops.draw import Draw
from tfglm.ops.group import Alone, Group, Message, together

PREPARE = "prepare"
"""The kind of message that has a window captured."""


class PackedCache:
    """The planes of every layer on the device, in bytes, and the pool of their pages.

    ranks: as LatentCache's. Raises ConfigError for an impossible size, MemoryShortError when the device has no room for
    it.
    """

    def __init__(self, config: ModelConfig, tokens: int, kv: KvFormat, device: torch.device, ranks: int = 1) -> None:
        if tokens < 1:
            raise ConfigError(f"the cache has room for {tokens} tokens; at least 1 is needed")
        self.pool = PagePool(pages_for(tokens), ranks)
        row = layer_bytes(config, kv.value)
        self.bytes_per_token = trunk_bytes_per_token(config, kv.value)

        def plane(width: int) -> torch.Tensor:
            return torch.zeros(self.pool.pages + (ranks > 1), PAGE, width, dtype=torch.uint8, device=device)

        try:
            self.layers = [
                LayerPlanes(plane(row.latent), plane(row.rotary), plane(row.index) if kind == "full" else None)
                for kind in config.indexer_types
            ]
        except torch.OutOfMemoryError as exc:
            gib = self.pool.pages * PAGE * self.bytes_per_token / 2**30
            raise MemoryShortError(
                f"a cache of {tokens} tokens needs {gib:.1f} GiB ({self.bytes_per_token} bytes a token) on the GPU, "
                "which has less left; ask for fewer tokens or a smaller kv format"
            ) from exc


class CudaGlm53(Glm53):
    """The model on a CUDA device, its weights held by `ops`. graphs: replay small windows instead of launching them,
    where the group can be part of a graph."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: CudaOps,
        *,
        tokens: int,
        graphs: bool = True,
        group: Group | None = None,
        cp: bool = False,
    ) -> None:
        self.device = ops.device
        self.config = config
        self.group = group or Alone()
        self.vocabulary = Vocabulary.of(config, self.group)
        self.ops: CudaOps = ops
        self.weights = weights
        ranks = self.group.ranks if cp else 1
        self.cache = PackedCache(config, tokens, ops.precision.kv, self.device, ranks)
        self.dealt = dealt_out(config, self.group, self.cache.pool) if cp else None
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self.frequencies = (1.0 / config.rope_theta**half).to(self.device)
        self.graphs = Graphs(self.device, config.vocab_size) if graphs and self.group.capturable else None
        self._sampler = Sampler(config.vocab_size, GRAPH_ROWS, self.device)
        self._host = torch.empty(GRAPH_ROWS, config.vocab_size, dtype=torch.float32, pin_memory=_pins(self.device))

    @property
    def decodes_alike(self) -> bool:
        """EXL3 experts sum in another order for prompts than for replies, and so does what is dealt out."""
        mixtures = (layer.ffn for layer in self.weights.layers if isinstance(layer.ffn, MoeWeights))
        return self.dealt is None and all(isinstance(mixture.experts, PlainExperts) for mixture in mixtures)

    @torch.inference_mode()
    def forward_drawn(self, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
        """`forward_tapped`, and the token after every wanted row that has a Draw: the very one of the engine's sampler,
        whatever the other rows are. Logits come along only if a row has none. No more than 16 rows."""
        with self._announced(window, taps) as rows:
            passed = self._launched(rows, taps)
            self._sampler.launch(passed.logits, draws)
            passed = self._on_host(passed, 0 if all(draws) else len(draws))
            return replace(passed, tokens=self._sampler.tokens(draws))

    def _forward(self, rows: LaidOut, taps: Taps) -> Passed:
        """Logits on the host of rank 0, which alone reads them; tapped rows stay on the device and belong to the
        caller."""
        return self._on_host(self._launched(rows, taps), len(rows.wanted) if self.group.rank == 0 else 0)

    def _on_host(self, passed: Passed, rows: int) -> Passed:
        """The first `rows` rows of logits, copied. Returns when all that was launched is done, also where no logits are
        wanted: the time of a prompt's chunk is what its share of the time is counted in."""
        logits = torch.empty(rows, self._host.shape[1])
        host = self._host[:rows] if rows <= GRAPH_ROWS else logits
        host.copy_(passed.logits[:rows], non_blocking=True)
        self.finished()
        return replace(passed, logits=logits if host is logits else logits.copy_(host))

    def _launched(self, rows: LaidOut, taps: Taps) -> Passed:
        """The wanted rows' logits on the device, where the next window may write over them."""
        count = rows.tokens.shape[0]
        if self.graphs is None or count > GRAPH_ROWS or rows.prompt:
            return super()._forward(self.on_device(rows), taps)
        wanted = rows.wanted.to(self.device) if len(rows.wanted) < count else None  # a copy that waits for the device
        passed = self._replayed(rows, context_kind(longest(rows)), taps)
        return passed if wanted is None else replace(passed, logits=passed.logits[wanted])

    @torch.inference_mode()
    def prepare(self, rows: int, window: int, taps: Taps) -> None:
        """Capture every decode window of up to `rows` rows that replies in windows of `window` tokens come to need, so
        that none has to wait for it; on all ranks."""
        if self.graphs is None:
            return
        stream, kinds = self.open_stream(), product(context_kinds(window), range(min(rows, GRAPH_ROWS), 0, -1))
        with self.graphs.told("model"):
            for context, count in kinds:
                with (
                    appended([Rows(stream, [0] * count, count)], self.cache.pool, self.config) as laid_out,
                    together(self.group, to_message(PREPARE, laid_out, {**taps.facts(), "context": context})),
                ):
                    self._replayed(laid_out, context, taps)
                    self.finished()
                stream.truncate(0)
        stream.close()

    def handlers(self) -> Mapping[str, Handler]:
        return {**super().handlers(), PREPARE: self._follow_prepare}

    @torch.inference_mode()
    def _follow_prepare(self, message: Message) -> None:
        [context] = message.integers("context")
        self._replayed(from_message(message), context, Taps.of(message))
        self.finished()

    def finished(self) -> None:
        """Wait until all that was launched is done, on a device that may have waited for the other ranks'."""
        torch.cuda.current_stream(self.device).synchronize()
        self.group.check()

    def close(self) -> None:
        self.graphs = None

    def on_device(self, rows: LaidOut) -> LaidOut:
        """A window as views of one copy on the device, whose operations are told how far it reaches."""
        self.ops.context, self.ops.prompt = pages_for(longest(rows)) * PAGE, rows.prompt
        inputs = packed(rows, len(rows.window.spans), self.ops.context, self.device)
        return unpacked(inputs.to(self.device, non_blocking=True), rows, len(rows.window.spans))

    def _replayed(self, rows: LaidOut, context: int, taps: Taps) -> Passed:
        """All rows' logits: the head reads its weights once however many are wanted."""
        assert self.graphs is not None
        count = rows.tokens.shape[0]
        key = ("trunk", count, context, taps)
        inputs = packed(rows, count, context, self.device)
        ready = self.graphs.find(key)
        if ready is None:
            ready = self._captured(key, inputs.to(self.device), rows, context, taps)
        else:
            ready.inputs[0].copy_(inputs, non_blocking=True)
        self.group.replay(ready.graph)
        passed: Passed = ready.result
        normed = None if passed.normed is None else passed.normed.clone()
        return Passed(passed.logits, normed, {layer: x.clone() for layer, x in passed.streams.items()})

    def _captured(self, key: Hashable, inputs: torch.Tensor, rows: LaidOut, context: int, taps: Taps) -> Captured:
        assert self.graphs is not None
        count, logits = rows.tokens.shape[0], self.graphs.logits
        laid_out = unpacked(inputs, replace(rows, wanted=torch.arange(count)), count)
        self.ops.context, self.ops.prompt = context, False

        def forward() -> Passed:
            passed = super(CudaGlm53, self)._forward(laid_out, taps)
            return replace(passed, logits=logits[:count].copy_(passed.logits))

        return self.graphs.capture(key, (inputs, laid_out.wanted), forward)


def _pins(device: torch.device) -> bool:
    """Whether memory on the host can be pinned for copies to and from a device."""
    return device.type == "cuda"


def longest(rows: LaidOut) -> int:
    """Tokens of the longest stream once the window is part of it."""
    return max(span.position + span.stop - span.start for span in rows.window.spans)


def packed(rows: LaidOut, streams: int, context: int, device: torch.device) -> torch.Tensor:
    """A window's tensors as one row of int64, with the pages of `context` tokens of `streams` streams.

    Pinned for a GPU, so that one copy that the host need not wait for brings them there.
    """
    window = rows.window
    pages = torch.zeros(streams, context // PAGE, dtype=torch.int64)
    given = window.pages[:, : pages.shape[1]]
    pages[: given.shape[0], : given.shape[1]] = given
    joined = torch.cat((rows.tokens, window.positions, window.slots, window.stream_of, pages.flatten()))
    return joined.pin_memory() if _pins(device) else joined


def unpacked(inputs: torch.Tensor, rows: LaidOut, streams: int) -> LaidOut:
    """The same window as views of the device's copy."""
    count = rows.tokens.shape[0]
    tokens, positions, slots, stream_of = inputs[: 4 * count].view(4, count)
    window = Window(positions, slots, inputs[4 * count :].view(streams, -1), stream_of, rows.window.spans)
    return LaidOut(tokens, window, rows.wanted.to(inputs.device), rows.prompt)


def load(
    config: ModelConfig,
    source: Source,
    *,
    tokens: int,
    kv: str,
    dense: str,
    head: str,
    graphs: bool = True,
    group: Group | None = None,
    cp: bool = False,
) -> CudaGlm53:
    """The model, or the source's part of it, on torch's current GPU. Raises ConfigError where there is none or a format
    is unknown."""
    if not torch.cuda.is_available():
        raise ConfigError("--device is 'cuda', but torch sees no NVIDIA GPU; supported here: cpu")
    formats = [kind.value for kind in KvFormat]
    if kv not in formats:
        raise ConfigError(f"--kv is {kv!r}; a GPU has {', '.join(formats)}")
    ops = CudaOps(Precision(KvFormat(kv), dense, head), torch.device("cuda", torch.cuda.current_device()))
    weights = load_weights(config, source, ops, partial=group is not None and group.ranks > 1)
    return CudaGlm53(config, weights, ops, tokens=tokens, graphs=graphs, group=group, cp=cp)


# ---- weights


def load_weights(config: ModelConfig, source: Source, ops: CudaOps, *, partial: bool = False) -> ModelWeights:
    """The trunk in the formats and on the device of `ops`; one layer at a time is held on the host. partial: of one
    rank, whose branches are float32 until those of all ranks are added."""
    layers = range(config.num_hidden_layers)
    return ModelWeights(
        embed=load_embedding(source).to(ops.device, torch.bfloat16),
        layers=tuple(hold_layer(load_layer(config, source, layer), ops, partial=partial) for layer in layers),
        norm=source.tensor("model.norm.weight").float().to(ops.device),
        head=ops.hold(source.linear("lm_head"), ops.precision.head, float_out=True),
    )


def hold_layer(layer: LayerWeights, ops: CudaOps, *, partial: bool = False) -> LayerWeights:
    """A layer's weights as `ops` computes with them. partial: both branches are float32, parts of a sum over ranks."""
    ffn = layer.ffn
    return LayerWeights(
        attention_norm=layer.attention_norm.to(ops.device),
        attention=_attention(layer.attention, ops, partial),
        ffn_norm=layer.ffn_norm.to(ops.device),
        ffn=_mlp(ffn, ops, float_out=partial) if isinstance(ffn, MlpWeights) else _moe(ffn, ops),
    )


def _attention(weights: AttentionWeights, ops: CudaOps, partial: bool) -> AttentionWeights:
    """The indexer stays bfloat16: its choices are made of near ties, which coarse weights turn over."""
    kind, indexer = ops.precision.dense, weights.indexer
    if indexer is not None:
        indexer = replace(
            indexer,
            wq_b=ops.hold(indexer.wq_b, "bf16"),
            key_and_heads=ops.hold(indexer.key_and_heads, "bf16"),
            key_norm=indexer.key_norm.to(ops.device),
            key_norm_bias=indexer.key_norm_bias.to(ops.device),
        )
    return AttentionWeights(
        a_proj=ops.hold(weights.a_proj, kind),
        q_norm=weights.q_norm.to(ops.device),
        q_b_proj=ops.hold(weights.q_b_proj, kind),
        latent_norm=weights.latent_norm.to(ops.device),
        key_up=ops.hold_heads(weights.key_up.transpose(1, 2)),
        value_up=ops.hold_heads(weights.value_up),
        o_proj=ops.hold(weights.o_proj, kind, float_out=partial),
        indexer=indexer,
    )


def _mlp(weights: MlpWeights, ops: CudaOps, *, float_out: bool = False) -> MlpWeights:
    kind = ops.precision.dense
    return MlpWeights(ops.hold(weights.gate_up, kind), ops.hold(weights.down, kind, float_out=float_out))


def _moe(weights: MoeWeights, ops: CudaOps) -> MoeWeights:
    return MoeWeights(
        gate=ops.hold(weights.gate, "bf16"),
        correction=weights.correction.to(ops.device),
        experts=ops.hold_experts(weights.experts),
        shared=_mlp(weights.shared, ops, float_out=True),
    )
