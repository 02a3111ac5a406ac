"""The operations on an NVIDIA GPU: `ops.base.Ops` as launches of the kernels in tfglm/kernels.

Activations are bfloat16; router logits, expert sums, the head's logits and vectors (norms, corrections) are float32.
Nothing here waits for the device. Results are torch tensors of torch's allocator, so a captured graph owns its scratch
and every graph of one pool shares it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.errors import ConfigError
from tfglm.formats.groups import GROUP
from tfglm.formats.latent import KvFormat
from tfglm.ops import cuda_attention, cuda_cache, cuda_indexer, cuda_linear, cuda_router, cuda_rows
from tfglm.ops.base import Experts, Part, PlainExperts, Rope, Routing, Selection, Window
from tfglm.ops.cuda_experts import Exl3Layers
from tfglm.ops.cuda_linear import Dense
from tfglm.ops.exl3_weights import Exl3Experts, Weight, plain
from tfglm.settings import DENSE_FORMATS


@dataclass(frozen=True)
class Precision:
    """Formats on the device. kv: the latent cache; dense: linear layers outside the experts; head: lm_head."""

    kv: KvFormat = KvFormat.BF16
    dense: str = "bf16"
    head: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("dense", "head"):
            if (kind := getattr(self, name)) not in DENSE_FORMATS:
                raise ConfigError(f"{name} is {kind!r}; supported: {', '.join(DENSE_FORMATS)}")


class CudaOps:
    """Set before a forward: context, at least the tokens visible to any row of the window, which sizes launches and
    scratch and changes no result; prompt, whether the rows are a part of a prompt, which EXL3 experts sum in another
    order than rows of a reply.
    """

    def __init__(self, precision: Precision, device: torch.device) -> None:
        self.precision = precision
        self.device = device
        self.context = 0
        self.prompt = False
        self._dense: dict[int, Dense] = {}  # weights in pieces, by the address of their data
        self._float_out: set[int] = set()
        self._exl3 = Exl3Layers(device)

    # ---- weights

    def hold(self, weight: Weight, kind: str, *, float_out: bool = False) -> torch.Tensor:
        """A linear layer's weight [outputs, inputs] as `linear` takes it: converted to `kind`, on the device.

        Weights whose inputs are no multiple of 64 stay bfloat16. float_out: its results are float32.
        """
        matrix = plain(weight)
        if not matrix.numel():  # of several ranks, one that has no part of it; nobody multiplies by it
            return matrix.to(self.device)
        if matrix.shape[1] % GROUP:
            kind = "bf16"
        dense = cuda_linear.pack(matrix.to(self.device), kind)
        if kind != "bf16":
            self._dense[dense.data.data_ptr()] = dense
        # Of a weight that is gone, another may have got the address.
        (self._float_out.add if float_out else self._float_out.discard)(dense.data.data_ptr())
        return dense.data

    def hold_heads(self, weight: torch.Tensor) -> torch.Tensor:
        """Each head's weight [heads, outputs, inputs], as `absorb` and `expand` take it."""
        return weight.to(self.device, torch.bfloat16).contiguous()

    def hold_experts(self, experts: Experts) -> Experts:
        """A layer's routed experts on the device, in the format they come in."""
        if isinstance(experts, PlainExperts):
            return PlainExperts(self.hold_heads(experts.gate_up), self.hold_heads(experts.down))
        return self._exl3.hold(experts)

    def _held(self, weight: Weight) -> Dense:
        assert isinstance(weight, torch.Tensor), "hold() makes a tensor of every weight"
        return self._dense.get(weight.data_ptr()) or Dense("bf16", weight.shape[0], weight.shape[1], weight)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    # ---- rows

    def embed(self, table: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return cuda_rows.embed(table, tokens, self._empty((tokens.shape[0], table.shape[1])))

    def angles(self, positions: torch.Tensor, frequencies: torch.Tensor) -> Rope:
        shape = (positions.shape[0], frequencies.shape[0])
        cos, sin = (self._empty(shape, torch.float32) for _ in range(2))
        return cuda_rows.angles(positions, frequencies, cos, sin)

    def rotate(self, x: torch.Tensor, rope: Rope) -> torch.Tensor:
        """In place: x is the result of a linear layer that nothing else reads."""
        return cuda_rows.rotate(x, rope, x)

    def linear(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        dense = self._held(weight)
        return self._linear(x, dense, torch.float32 if dense.data.data_ptr() in self._float_out else torch.bfloat16)

    def _linear(self, x: torch.Tensor, weight: Dense, dtype: torch.dtype) -> torch.Tensor:
        out = self._empty((x.shape[0], weight.rows), dtype)
        return cuda_linear.linear(x, weight, out) if x.shape[0] else out

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return cuda_rows.rms_norm(x, weight, eps, self._empty((x.shape[0], x.shape[1])))

    def add_rms_norm(
        self, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total, out = torch.empty_like(x), torch.empty_like(x)
        if not x.shape[0]:  # a prompt chunk of which no logits are wanted
            return total, out
        return cuda_rows.add_rms_norm(x, branch, weight, eps, total, out)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return cuda_rows.swiglu(gate_up, self._empty((gate_up.shape[0], gate_up.shape[1] // 2)))

    # ---- attention

    def split_latents(
        self, a: torch.Tensor, q_norm: torch.Tensor, latent_norm: torch.Tensor, eps: float, rope: Rope, window: Window,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out = self._empty((a.shape[0], q_norm.shape[0]))
        return cuda_cache.split_latents(
            a, q_norm, latent_norm, eps, rope, window.slots, self.precision.kv, latent_plane, rope_plane, out
        )

    def write_index_key(
        self, key: torch.Tensor, norm: torch.Tensor, bias: torch.Tensor, rope: Rope, window: Window, plane: torch.Tensor
    ) -> None:
        cuda_cache.write_index_key(key, norm, bias, rope, window.slots, self.precision.kv, plane)

    def select(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, plane: torch.Tensor, count: int
    ) -> Selection:
        return cuda_indexer.select(
            queries, head_weights, window, plane, self.precision.kv, count, self.context, self._empty
        )

    def best_keys(
        self, queries: torch.Tensor, head_weights: torch.Tensor, window: Window, visible: torch.Tensor,
        plane: torch.Tensor, count: int, first: int, step: int,
    ) -> torch.Tensor:  # fmt: skip
        return cuda_indexer.best_keys(
            queries, head_weights, window, visible, plane, self.precision.kv, count, first, step, self.context,
            self._empty,
        )  # fmt: skip

    def absorb(self, queries: torch.Tensor, key_up: torch.Tensor) -> torch.Tensor:
        """key_up [H, C, nope], transposed against the reference's: the sum runs along a row."""
        rows, heads, _ = queries.shape
        return cuda_linear.per_head(queries, key_up, self._empty((rows, heads, key_up.shape[1])))

    def attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> torch.Tensor:  # fmt: skip
        out = self._empty(tuple(latent_queries.shape))
        return self._attend(latent_queries, rope_queries, selection, scale, latent_plane, rope_plane, rope, out)

    def attend_part(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope,
    ) -> Part:  # fmt: skip
        out = self._empty(tuple(latent_queries.shape), torch.float32)
        peak = self._empty(tuple(latent_queries.shape[:2]), torch.float32)
        self._attend(latent_queries, rope_queries, selection, scale, latent_plane, rope_plane, rope, out, peak)
        return Part(out, peak, (peak > float("-inf")).float())

    def _attend(
        self, latent_queries: torch.Tensor, rope_queries: torch.Tensor, selection: Selection, scale: float,
        latent_plane: torch.Tensor, rope_plane: torch.Tensor, rope: Rope, out: torch.Tensor,
        log_sums: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        listed = Selection(selection.slots.int(), selection.counts.int())  # as they are, unless torch made them
        return cuda_attention.attend(
            latent_queries, rope_queries, rope, listed, scale, self.precision.kv, latent_plane, rope_plane,
            min(self.context, listed.slots.shape[1]), out, self._empty, log_sums,
        )  # fmt: skip

    def expand(self, attended: torch.Tensor, value_up: torch.Tensor) -> torch.Tensor:
        rows, heads, _ = attended.shape
        return cuda_linear.per_head(attended, value_up, self._empty((rows, heads, value_up.shape[1]))).flatten(1)

    # ---- experts

    def route(self, x: torch.Tensor, gate: Weight, correction: torch.Tensor, config: ModelConfig) -> Routing:
        if config.n_group > 1:
            raise ConfigError(f"n_group is {config.n_group}; the GPU's router chooses among all experts at once (1)")
        logits = self._linear(x, self._held(gate), torch.float32)
        shape = (x.shape[0], config.num_experts_per_tok)
        chosen, weights = self._empty(shape, torch.int32), self._empty(shape, torch.float32)
        return cuda_router.route(
            logits, correction, config.norm_topk_prob, config.routed_scaling_factor, chosen, weights
        )

    def experts(
        self, x: torch.Tensor, routing: Routing, experts: Experts, shared: torch.Tensor | None = None
    ) -> torch.Tensor:
        """shared and the result are float32 [R, hidden]."""
        rows, picks = routing.experts.shape
        if isinstance(experts, Exl3Experts):
            out = self._empty((rows, x.shape[1]), torch.float32)
            return self._exl3.run(x, routing, experts, shared, out, prompt=self.prompt)
        count, doubled, hidden = experts.gate_up.shape
        pairs, most = rows * picks, min(count, rows * picks)
        groups = cuda_router.Groups(*(self._empty((n,), torch.int32) for n in (pairs, most + 1, most)))
        cuda_router.group(routing.experts, count, groups)
        where = (groups.pairs, groups.starts, groups.experts)
        gate_up = cuda_linear.experts(x, picks, experts.gate_up, self._empty((pairs, doubled)), *where)
        down = self._empty((pairs, hidden), torch.float32)
        cuda_linear.experts(self.swiglu(gate_up), 1, experts.down, down, *where)
        return cuda_rows.combine(down, routing.weights, shared, self._empty((rows, hidden), torch.float32))
