"""GLM-5.3 on an NVIDIA GPU: the same forward pass, with its small windows captured in CUDA graphs.

A window of up to 16 rows is replayed from a graph of its own (rows, context) kind. Contexts are rounded up to powers of
two, which sizes launches but changes no result; graph and eager forward give the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE, PagePool, pages_for
from tfglm.cache.sizes import layer_bytes, trunk_bytes_per_token
from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError, MemoryShortError
from tfglm.formats.latent import KvFormat
from tfglm.models.glm53 import Glm53
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
from tfglm.models.window import LaidOut
from tfglm.ops.base import PlainExperts, Window
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.group import Alone, Group

GRAPH_ROWS = 16
_LEAST_CONTEXT = 4096


class PackedCache:
    """The planes of every layer on the device, in bytes, and the pool of their pages.

    Raises ConfigError for an impossible size, MemoryShortError when the device has no room for it.
    """

    def __init__(self, config: ModelConfig, tokens: int, kv: KvFormat, device: torch.device) -> None:
        if tokens < 1:
            raise ConfigError(f"the cache has room for {tokens} tokens; at least 1 is needed")
        self.pool = PagePool(pages_for(tokens))
        row = layer_bytes(config, kv.value)
        self.bytes_per_token = trunk_bytes_per_token(config, kv.value)

        def plane(width: int) -> torch.Tensor:
            return torch.zeros(self.pool.pages, PAGE, width, dtype=torch.uint8, device=device)

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


@dataclass(frozen=True)
class _Graph:
    """A captured forward: where its inputs are read, what replays it, where its results lie."""

    inputs: torch.Tensor
    wanted: torch.Tensor  # read by the graph, so it must live as long
    graph: torch.cuda.CUDAGraph
    passed: Passed


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
    ) -> None:
        self.device = ops.device
        self.config = config
        self.group = group or Alone()
        self.vocabulary = Vocabulary.of(config, self.group)
        self.ops: CudaOps = ops
        self.weights = weights
        self.cache = PackedCache(config, tokens, ops.precision.kv, self.device)  # type: ignore[assignment]
        half = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32) / config.qk_rope_head_dim
        self.frequencies = (1.0 / config.rope_theta**half).to(self.device)
        self._use_graphs = graphs = graphs and self.group.capturable
        self._graphs: dict[tuple[int, int, Taps], _Graph] = {}
        self._pool = torch.cuda.graph_pool_handle() if graphs else None
        # Of all graphs: rows of 154,880 floats that each kept for itself would come to 80 MiB for every context.
        self._logits: torch.Tensor | None = None

    @property
    def decodes_alike(self) -> bool:
        """EXL3 experts sum in another order for prompts than for replies."""
        mixtures = (layer.ffn for layer in self.weights.layers if isinstance(layer.ffn, MoeWeights))
        return all(isinstance(mixture.experts, PlainExperts) for mixture in mixtures)

    def _forward(self, rows: LaidOut, taps: Taps) -> Passed:
        """Logits on the host; tapped rows stay on the device and belong to the caller. Returns when all of it is done,
        also where no logits are wanted: the time of a prompt's chunk is what its share of the time is counted in."""
        count, longest = rows.tokens.shape[0], _longest(rows)
        if self._use_graphs and count <= GRAPH_ROWS and not rows.prompt:
            return self._replay(rows, max(_LEAST_CONTEXT, 1 << (longest - 1).bit_length()), taps)
        passed = super()._forward(self.on_device(rows), taps)
        torch.cuda.current_stream(self.device).synchronize()
        return replace(passed, logits=passed.logits.cpu())

    def on_device(self, rows: LaidOut) -> LaidOut:
        """A window as views of one copy on the device, whose operations are told how far it reaches."""
        self.ops.context, self.ops.prompt = pages_for(_longest(rows)) * PAGE, rows.prompt
        packed = _packed(rows, len(rows.window.spans), self.ops.context, self.device)
        return _unpacked(packed.to(self.device), rows, len(rows.window.spans))

    def _replay(self, rows: LaidOut, context: int, taps: Taps) -> Passed:
        count = rows.tokens.shape[0]
        inputs = _packed(rows, count, context, self.device)
        key = (count, context, taps)
        if key not in self._graphs:
            self._graphs[key] = self._capture(inputs.to(self.device), rows, context, taps)
        ready = self._graphs[key]
        ready.inputs.copy_(inputs, non_blocking=True)
        ready.graph.replay()
        normed = None if ready.passed.normed is None else ready.passed.normed.clone()
        streams = {layer: x.clone() for layer, x in ready.passed.streams.items()}
        return Passed(ready.passed.logits.cpu()[rows.wanted], normed, streams)

    def _capture(self, inputs: torch.Tensor, rows: LaidOut, context: int, taps: Taps) -> _Graph:
        """All rows' logits are computed: the head reads its weights once however many are wanted."""
        count = rows.tokens.shape[0]
        laid_out = _unpacked(inputs, replace(rows, wanted=torch.arange(count)), count)
        self.ops.context, self.ops.prompt = context, False
        warm = super()._forward(laid_out, taps)  # loads every kernel; what it writes, the replay writes again
        if self._logits is None:
            self._logits = torch.empty(GRAPH_ROWS, warm.logits.shape[1], dtype=torch.float32, device=self.device)
        del warm
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            passed = super()._forward(laid_out, taps)
            passed = replace(passed, logits=self._logits[:count].copy_(passed.logits))
        return _Graph(inputs, laid_out.wanted, graph, passed)


def _longest(rows: LaidOut) -> int:
    """Tokens of the longest stream once the window is part of it."""
    return max(span.position + span.stop - span.start for span in rows.window.spans)


def _packed(rows: LaidOut, streams: int, context: int, device: torch.device) -> torch.Tensor:
    """A window's tensors as one row of int64, with the pages of `context` tokens of `streams` streams.

    Pinned for a GPU, so that one copy that the host need not wait for brings them there.
    """
    window = rows.window
    pages = torch.zeros(streams, context // PAGE, dtype=torch.int64)
    given = window.pages[:, : pages.shape[1]]
    pages[: given.shape[0], : given.shape[1]] = given
    packed = torch.cat((rows.tokens, window.positions, window.slots, window.stream_of, pages.flatten()))
    return packed.pin_memory() if device.type == "cuda" else packed


def _unpacked(packed: torch.Tensor, rows: LaidOut, streams: int) -> LaidOut:
    """The same window as views of the device's copy."""
    count = rows.tokens.shape[0]
    tokens, positions, slots, stream_of = packed[: 4 * count].view(4, count)
    window = Window(positions, slots, packed[4 * count :].view(streams, -1), stream_of, rows.window.spans)
    return LaidOut(tokens, window, rows.wanted.to(packed.device), rows.prompt)


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
) -> CudaGlm53:
    """The model, or the source's part of it, on torch's current GPU. Raises ConfigError where there is none or a format
    is unknown."""
    if not torch.cuda.is_available():
        raise ConfigError("device is 'cuda', but torch sees no NVIDIA GPU; supported here: cpu")
    formats = [kind.value for kind in KvFormat]
    if kv not in formats:
        raise ConfigError(f"kv is {kv!r}; supported on a GPU: {', '.join(formats)}")
    ops = CudaOps(Precision(KvFormat(kv), dense, head), torch.device("cuda", torch.cuda.current_device()))
    weights = load_weights(config, source, ops, partial=group is not None and group.ranks > 1)
    return CudaGlm53(config, weights, ops, tokens=tokens, graphs=graphs, group=group)


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
