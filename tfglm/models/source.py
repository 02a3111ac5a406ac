"""Where weights come from: tensors and linears by their checkpoint names, in whatever format they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.formats.exl3_code import BLOCK
from tfglm.layout import Share
from tfglm.models.exl3_loader import read_experts, read_linear, whole_blocks
from tfglm.ops.base import Experts, PlainExperts
from tfglm.ops.exl3_weights import Weight, plain

Read = Callable[[str], torch.Tensor]


class Source:
    """Plain tensors by name, each in memory of its own: from `Checkpoint.read`, or a state dict's __getitem__."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def tensor(self, name: str) -> torch.Tensor:
        return self._read(name)

    def linear(self, name: str) -> Weight:
        """The linear whose plain matrix [outputs, inputs] would be called `name`.weight; a rank's part of it where the
        source is one rank's."""
        return self.tensor(f"{name}.weight")

    def experts(self, config: ModelConfig, prefix: str) -> Experts:
        """The routed experts prefix.0, prefix.1, .. of one layer, filled one matrix at a time. Where experts differ in
        their inner columns the narrower ones get columns of zeros, which change nothing."""
        count, hidden, inner = config.n_routed_experts, config.hidden_size, self._inner(config, prefix)
        for expert in range(count):
            gate, up, down = (plain(self.linear(f"{prefix}.{expert}.{name}_proj")) for name in ("gate", "up", "down"))
            if expert == 0:
                gate_up, downs = gate.new_zeros(count, 2 * inner, hidden), down.new_zeros(count, hidden, inner)
            gate_up[expert, : len(gate)] = gate
            gate_up[expert, inner : inner + len(up)] = up
            downs[expert, :, : down.shape[1]] = down
        return PlainExperts(gate_up, downs)

    def _inner(self, config: ModelConfig, prefix: str) -> int:
        """The most inner columns that are held of any expert of a layer."""
        return config.moe_intermediate_size


class CheckpointSource(Source):
    """The tensors of an open checkpoint; linears and experts stored as EXL3 stay so.

    share: the part of every matrix that is read, None for all. An EXL3 linear outside the experts whose part is no run
    of whole 128-column blocks is read whole and decoded. progress is called after each tensor with the bytes of those
    that are done; nbytes_read are the bytes that were really read.
    """

    def __init__(
        self, checkpoint: Checkpoint, progress: Callable[[int], None] | None = None, share: Share | None = None
    ) -> None:
        super().__init__(self._plain)
        self._checkpoint = checkpoint
        self._progress = progress
        self._share = share
        self._done = 0
        self.nbytes_read = 0

    def linear(self, name: str) -> Weight:
        rows, columns = self._part(name)
        linear = self._checkpoint.linears.get(name)
        if rows.start == rows.stop or columns.start == columns.stop:
            return torch.empty(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bfloat16)
        if linear is None:
            return self._slice(f"{name}.weight", rows, columns)
        outputs, inputs = self._checkpoint.shapes[name]
        if whole_blocks(rows, outputs) and whole_blocks(columns, inputs):
            return read_linear(self._slice, name, linear, outputs, inputs, (rows, columns))
        return plain(read_linear(self._slice, name, linear, outputs, inputs))[rows, columns].contiguous()

    def experts(self, config: ModelConfig, prefix: str) -> Experts:
        if f"{prefix}.0.gate_proj" not in self._checkpoint.linears or not self._inner(config, prefix):
            return super().experts(config, prefix)
        kept = [self._part(f"{prefix}.{expert}.gate_proj")[0] for expert in range(config.n_routed_experts)]
        # The last block of columns that are no multiple of 128 is padded.
        shares = [(part.start, -(-part.stop // BLOCK) * BLOCK) for part in kept]
        return read_experts(self._slice, self._checkpoint.linears, prefix, config.n_routed_experts, shares)

    def _inner(self, config: ModelConfig, prefix: str) -> int:
        kept = [self._part(f"{prefix}.{expert}.gate_proj")[0] for expert in range(config.n_routed_experts)]
        return max(part.stop - part.start for part in kept)

    def _part(self, name: str) -> tuple[slice, slice]:
        """The rows and columns of a matrix to read."""
        shape = self._checkpoint.shapes.get(name) or self._checkpoint.entries[f"{name}.weight"].shape
        return self._share.part(name, shape) if self._share else (slice(0, shape[0]), slice(0, shape[1]))

    def _plain(self, name: str) -> torch.Tensor:
        """A tensor as stored; in place of a quantised linear's .weight the float32 matrix it stands for."""
        linear = name.removesuffix(".weight")
        return plain(self.linear(linear)) if linear in self._checkpoint.linears else self._slice(name)

    def _slice(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        tensor = self._checkpoint.read(name, rows, columns)
        self.nbytes_read += tensor.nbytes
        self._done += self._checkpoint.entries[name].nbytes
        if self._progress:
            self._progress(self._done)
        return tensor


class RenamedSource(Source):
    """Another source's tensors under other names: rename gives the name there. `held` are taken from memory instead."""

    def __init__(self, source: Source, rename: Callable[[str], str], held: Mapping[str, Weight]) -> None:
        super().__init__(self._tensor)
        self._source = source
        self._rename = rename
        self._held = held

    def _tensor(self, name: str) -> torch.Tensor:
        held = self._held.get(name.removesuffix(".weight"))
        return held if isinstance(held, torch.Tensor) else self._source.tensor(self._rename(name))

    def linear(self, name: str) -> Weight:
        return self._held[name] if name in self._held else self._source.linear(self._rename(name))

    def experts(self, config: ModelConfig, prefix: str) -> Experts:
        return self._source.experts(config, self._rename(prefix))


def as_source(source: Source | Read) -> Source:
    return source if isinstance(source, Source) else Source(source)
