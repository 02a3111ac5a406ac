"""Where weights come from: tensors and linears by their checkpoint names, in whatever format they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.store import Checkpoint
from tfglm.models.exl3_loader import read_experts, read_linear
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
        """The linear whose plain matrix [outputs, inputs] would be called `name`.weight."""
        return self.tensor(f"{name}.weight")

    def experts(self, config: ModelConfig, prefix: str) -> Experts:
        """The routed experts prefix.0, prefix.1, .. of one layer, filled one matrix at a time."""
        count, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        for expert in range(count):
            gate, up, down = (self.tensor(f"{prefix}.{expert}.{name}_proj.weight") for name in ("gate", "up", "down"))
            if expert == 0:
                gate_up, downs = gate.new_empty(count, 2 * inner, hidden), down.new_empty(count, hidden, inner)
            gate_up[expert, :inner] = gate
            gate_up[expert, inner:] = up
            downs[expert] = down
        return PlainExperts(gate_up, downs)


class CheckpointSource(Source):
    """The tensors of an open checkpoint; linears and experts stored as EXL3 stay so.

    progress is called after each tensor with the bytes read so far.
    """

    def __init__(self, checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> None:
        super().__init__(self._plain)
        self._checkpoint = checkpoint
        self._progress = progress
        self._done = 0

    def linear(self, name: str) -> Weight:
        linear = self._checkpoint.linears.get(name)
        if linear is None:
            return self.tensor(f"{name}.weight")
        outputs, inputs = self._checkpoint.shapes[name]
        return read_linear(self._slice, name, linear, outputs, inputs)

    def experts(self, config: ModelConfig, prefix: str) -> Experts:
        if f"{prefix}.0.gate_proj" not in self._checkpoint.linears:
            return super().experts(config, prefix)
        return read_experts(self._slice, self._checkpoint.linears, prefix, config.n_routed_experts)

    def _plain(self, name: str) -> torch.Tensor:
        """A tensor as stored; in place of a quantised linear's .weight the float32 matrix it stands for."""
        linear = name.removesuffix(".weight")
        return plain(self.linear(linear)) if linear in self._checkpoint.linears else self._slice(name)

    def _slice(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        tensor = self._checkpoint.read(name, rows, columns)
        self._done += tensor.nbytes
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
