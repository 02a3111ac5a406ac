"""The routed experts of one layer: what each has seen, how many bits each gets, and their EXL3 tensors.

Errors are weighed as the model will feel them: a row counts by its routing weight, an expert by the energy of what it
adds to the residual stream.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from tfglm.errors import CheckpointError
from tfglm.formats.exl3_code import MARKERS, codebook_table
from tfglm.ops.base import PlainExperts, Routing
from tfglm.ops.exl3_weights import PROJECTIONS
from tfglm.quantize import scales
from tfglm.quantize.allocate import NMSE, Item, allocate, floored
from tfglm.quantize.encoder import Encoder, Search, tile_order
from tfglm.quantize.hessian import Feedback, HessianSum, damped, feedback, filled_up
from tfglm.quantize.linear import Inputs, Quantised, expected_error, quantise, random_signs
from tfglm.quantize.recipe import Recipe

GATE, UP, DOWN = range(3)
_SUM_ROWS = 16384
_SCALE_TILES = 32
_SCALE_EXPERTS = 4
"""The scale of a width is searched on some tiles of a few experts; after rotation all look alike."""


@dataclass(frozen=True)
class Seen:
    """What the calibration says of one expert: mean w^2 x x^T of the inputs of gate and up, and of down (None without
    signal); rows that chose it; energy of what it added to the rows, a row of the whole text."""

    gate_up: torch.Tensor | None
    down: torch.Tensor | None
    rows: int
    energy: float


@dataclass(frozen=True)
class Finished:
    """One expert done: its tensors by field name under the expert's prefix, and each matrix's width and figures."""

    tensors: dict[str, torch.Tensor]
    widths: tuple[float, float, float]
    matrices: tuple[Quantised, Quantised, Quantised]


class ExpertLayer:
    """name: of the layer's experts in the checkpoint. rows [T, hidden]: what the calibration sends into the layer, and
    its routing. experts: the plain matrices. All on one device, on which everything is computed. Raises CheckpointError
    for values that are not finite."""

    def __init__(
        self, name: str, rows: torch.Tensor, routing: Routing, experts: PlainExperts, recipe: Recipe, search: Search
    ) -> None:
        self.name = name
        self.recipe = recipe
        self._rows = rows
        self._routing = routing
        self._experts = experts
        self._search = search
        self._scales: dict[tuple[bool, float], float] = {}
        self._check()

    def _check(self) -> None:
        """One weight that is no number would make all figures of the layer so."""
        fetch = "fetch the file that holds it again (model.safetensors.index.json names it)"
        for expert in range(self.count):
            for projection, matrix in enumerate(PROJECTIONS):
                if not bool(self._matrix(expert, projection).isfinite().all()):
                    raise CheckpointError(
                        f"{self.name}.{expert}.{matrix}.weight has values that are not finite; {fetch}"
                    )
        if not bool(self._routing.weights.isfinite().all()):
            gate = self.name.removesuffix("experts") + "gate.weight"
            raise CheckpointError(f"the calibration rows' routing by {gate} is not finite; {fetch}")

    @property
    def count(self) -> int:
        return len(self._experts.gate_up)

    def widths(self, half_bits: int) -> list[tuple[float, float]]:
        """(gate and up, down) of each expert, that add up to half_bits / 2 over all matrices (gate and up count one
        each)."""
        offer = self.recipe.widths
        if len(offer) == 1:
            return [(offer[0], offer[0])] * self.count
        seen, relative = [], []
        for expert in range(self.count):
            found = self.seen(expert)
            seen.append(found.energy)
            relative.append(self._expected(expert, found))
        importance = floored(seen, self.recipe.rare_share) if any(seen) else [1.0] * self.count
        items = []
        for weight, (gate_up, down) in zip(importance, relative, strict=True):
            for matrices, error in ((2, gate_up), (1, down)):
                items.append(Item(matrices, tuple(weight * error * NMSE[width] for width in offer)))
        chosen = allocate(items, offer, half_bits)
        return list(zip(chosen[::2], chosen[1::2], strict=True))

    def quantised(self, widths: list[tuple[float, float]]) -> Iterator[Finished]:
        """Each expert in turn."""
        for expert, (gate_up, down) in enumerate(widths):
            yield self._finish(expert, (gate_up, gate_up, down))

    # ---- calibration
    def seen(self, expert: int) -> Seen:
        """Computed anew at each call: Hessians of all experts of a layer would not fit in memory at once."""
        row, pick = (self._routing.experts == expert).nonzero(as_tuple=True)
        weights, x = self._routing.weights[row, pick], self._rows[row].float()
        gate, up, down = (self._matrix(expert, projection) for projection in (GATE, UP, DOWN))
        hidden = torch.nn.functional.silu(x @ gate) * (x @ up)
        output = (hidden @ down) * weights[:, None]
        energy = float(output.square().sum()) / len(self._rows)
        if not math.isfinite(energy):
            raise CheckpointError(
                f"{self.name}.{expert}: its output on the calibration rows is not finite, its matrices are; quantise "
                "with other --calibration text, or with --device cpu if this was a GPU"
            )
        return Seen(
            gate_up=damped(filled_up(_mean(x, weights), len(row), self._mean_of_all)),
            down=damped(filled_up(_mean(hidden, weights), len(row))),
            rows=len(row),
            energy=energy,
        )

    @cached_property
    def _mean_of_all(self) -> torch.Tensor:
        total = HessianSum(self._rows.shape[1], self._rows.device)
        for rows in self._rows.split(_SUM_ROWS):
            total.add(rows)
        return total.mean()

    # ---- the matrices
    def _matrix(self, expert: int, projection: int) -> torch.Tensor:
        """float32 [k, n]"""
        if projection == DOWN:
            return self._experts.down[expert].float().T
        gate, up = self._experts.gate_up[expert].chunk(2)
        return (gate if projection == GATE else up).float().T

    def _sv(self, expert: int, projection: int, w: torch.Tensor) -> torch.Tensor:
        name = f"{self.name}.{expert}.{PROJECTIONS[projection]}.svh"
        return scales.output_scales(w, random_signs(name, w.shape[1]).to(w))

    def _su(self, expert: int, projection: int, w: torch.Tensor, sv: torch.Tensor) -> torch.Tensor:
        """The input scales: the layer's own for gate and up if they are shared."""
        if projection != DOWN and self.recipe.shared_suh:
            return self._shared_su
        name = f"{self.name}.{expert}.{PROJECTIONS[projection]}.suh"
        return scales.input_scales(scales.row_energy(w, sv), w.shape[1], random_signs(name, len(w)).to(w))

    @cached_property
    def _shared_su(self) -> torch.Tensor:
        energy, columns = torch.zeros(self._rows.shape[1], device=self._rows.device), 0
        for expert in range(self.count):
            for projection in (GATE, UP):
                w = self._matrix(expert, projection)
                energy += scales.row_energy(w, self._sv(expert, projection, w))
                columns += w.shape[1]
        return scales.input_scales(energy, columns, random_signs(f"{self.name}.suh", len(energy)).to(energy))

    def _expected(self, expert: int, seen: Seen) -> tuple[float, float]:
        """Error per unit of NMSE over the signal, of gate and up together and of down: how much of an expert's output
        an error in its matrices spoils, all three about alike."""
        parts = []
        for projection in (GATE, UP, DOWN):
            w = self._matrix(expert, projection)
            sv = self._sv(expert, projection, w)
            h = seen.down if projection == DOWN else seen.gate_up
            factor = self._feedback(h, self._su(expert, projection, w, sv))
            signal = float((w * (w if h is None else h @ w)).sum())
            parts.append(expected_error(sv, factor.spread) / signal if signal else 0.0)
        return parts[GATE] + parts[UP], parts[DOWN]

    def _feedback(self, h: torch.Tensor | None, su: torch.Tensor) -> Feedback:
        if h is None:
            return Feedback(None, float(su.square().sum()))
        return feedback(scales.rotated_hessian(h, su))

    def _finish(self, expert: int, widths: tuple[float, float, float]) -> Finished:
        seen, codebook = self.seen(expert), self.recipe.codebook
        tensors: dict[str, torch.Tensor] = {}
        done: list[Quantised] = []
        shared: Feedback | None = None
        for projection, name in enumerate(PROJECTIONS):
            w, bits = self._matrix(expert, projection), widths[projection]
            sv = self._sv(expert, projection, w)
            su = self._su(expert, projection, w, sv)
            own = projection == DOWN or not self.recipe.shared_suh
            h = seen.down if projection == DOWN else seen.gate_up
            factor = self._feedback(h, su) if own or shared is None else shared
            shared = None if own else factor
            encoder = Encoder(self._search, bits, codebook)
            result = quantise(w, Inputs(su, h, factor), sv, self._scale(projection, encoder), encoder, own_su=own)
            done.append(result)
            tensors |= {f"{name}.trellis": result.trellis, f"{name}.suh": result.suh, f"{name}.svh": result.svh}
            if codebook in MARKERS:
                tensors[f"{name}.{codebook}"] = torch.tensor(MARKERS[codebook] - 2**32, dtype=torch.int32)
        return Finished(tensors, widths, (done[GATE], done[UP], done[DOWN]))

    def _scale(self, projection: int, encoder: Encoder) -> float:
        key = projection == DOWN, encoder.bits
        if key not in self._scales:
            order = tile_order(self._rows.device)[0]
            samples = []
            for expert in range(min(_SCALE_EXPERTS, self.count)):
                w = self._matrix(expert, projection)
                sv = self._sv(expert, projection, w)
                rotated = scales.to_rotated(w, self._su(expert, projection, w, sv), sv)
                tiles = scales.to_tiles(rotated, order)
                samples.append(scales.sample_tiles(tiles, _SCALE_TILES // _SCALE_EXPERTS))
            spread = float(codebook_table(encoder.codebook).astype("float64").std())
            self._scales[key] = scales.search_scale(torch.cat(samples), encoder.bits, spread, encoder.decoded)
        return self._scales[key]


def _mean(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = HessianSum(x.shape[1], x.device)
    total.add(x, weights)
    return total.mean()


@dataclass(frozen=True)
class LayerReport:
    """Figures of one layer's experts.

    widths: how many matrices have each. bits: mean width. proxy_error: tr(E^T H E) / tr(W^T H W), and nmse: squared
    error of the weights over theirs, both the mean over the matrices. nbytes: of all tensors.
    """

    layer: int
    matrices: int
    bits: float
    widths: dict[str, int]
    proxy_error: float
    nmse: float
    nbytes: int
    seconds: float


def report(layer: int, finished: list[Finished], seconds: float) -> LayerReport:
    matrices = [matrix for expert in finished for matrix in expert.matrices]
    widths = [width for expert in finished for width in expert.widths]
    counted = Counter(f"{width:g}" for width in widths)
    return LayerReport(
        layer=layer,
        matrices=len(matrices),
        bits=statistics.fmean(widths),
        widths=dict(sorted(counted.items(), key=lambda item: float(item[0]))),
        proxy_error=statistics.fmean(matrix.proxy_error for matrix in matrices),
        nmse=statistics.fmean(matrix.noise for matrix in matrices),
        nbytes=sum(tensor.nbytes for expert in finished for tensor in expert.tensors.values()),
        seconds=seconds,
    )
