"""One training step, and what a run must remember to go on as if it had not been stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.data.pack import PROMPT, REPLY, Tokens, Weights
from training.model import Moe, Output, Trained
from training.optim import optimisers, set_lr
from training.plan import Phase, Plan


def cross_entropy(normed: Tensor, head: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The weighted mean over rows [N]; normed [N, hidden]."""
    losses = F.cross_entropy((normed @ head.to(normed.dtype).t()).float(), targets, reduction="none")
    return (losses * weights).sum() / weights.sum().clamp_min(1.0)


class Trainer:
    """A model, its optimisers and a plan. seed: of the probed rows."""

    def __init__(self, model: Trained, plan: Plan, device: torch.device, seed: int = 0) -> None:
        self.model, self.plan, self.device = model.to(device), plan, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.optimisers = optimisers(model, muon_lr=plan.muon_lr, adam_lr=plan.adam_lr, decay=plan.weight_decay)
        self.step = 0
        self.tokens = 0
        self._seed = seed
        self._cross_entropy = cross_entropy
        if device.type == "cuda":
            torch._dynamo.config.recompile_limit = 64
            torch.set_float32_matmul_precision("high")
            for layer in model.layers:
                layer.compile(dynamic=False)
            self._cross_entropy = torch.compile(cross_entropy, dynamic=False)

    def train(self, tokens: Tokens, weights: Weights, phase: Phase, progress: float) -> dict[str, Tensor]:
        """One step over rows [B, T]; returns figures, still on the device."""
        ids = torch.from_numpy(tokens.astype(np.int64)).to(self.device, non_blocking=True)
        worth = self._worth(torch.from_numpy(weights).to(self.device, non_blocking=True))
        probe = self._probe(phase.length)
        set_lr(self.optimisers, self.plan.lr(progress))
        out = self.model(ids, probe, sparse=phase.sparse, dtype=self.dtype)
        figures = self._losses(out, ids, worth, probe)
        loss = figures["loss"] + self.plan.mtp_weight * figures["mtp"] + figures["indexer"]
        loss.backward()
        small = [p for group in self.optimisers[1].param_groups for p in group["params"] if p.grad is not None]
        torch.nn.utils.clip_grad_norm_(small, 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        figures |= self._balance(out, progress)
        self.step += 1
        self.tokens += tokens.size
        return {name: value.detach() for name, value in figures.items()}

    def warm_up(self, phase: Phase) -> None:
        """A step of a phase without its effect, which compiles what the phase needs."""
        ids = torch.zeros(phase.rows, phase.length, dtype=torch.int64, device=self.device)
        probe = self._probe(phase.length)
        out = self.model(ids, probe, sparse=phase.sparse, dtype=self.dtype)
        sum(self._losses(out, ids, torch.ones(ids.shape, device=self.device), probe).values()).backward()
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _losses(self, out: Output, ids: Tensor, worth: Tensor, probe: Tensor) -> dict[str, Tensor]:
        head = self.model.lm_head.weight
        assert out.mtp is not None
        next_ids, next_worth = _shifted(ids, worth, 1)
        after_ids, after_worth = _shifted(ids, worth, 2)
        return {
            "loss": self._cross_entropy(out.normed.flatten(0, 1), head, next_ids.flatten(), next_worth.flatten()),
            "mtp": self._cross_entropy(out.mtp.flatten(0, 1), head, after_ids.flatten(), after_worth.flatten()),
            "indexer": self.model.indexer_loss(out.steps, probe),
        }

    def _worth(self, weights: Tensor) -> Tensor:
        return (weights == REPLY).float() + self.plan.prompt_weight * (weights == PROMPT).float()

    def _probe(self, length: int) -> Tensor:
        """Positions, ascending, spread over the sequence and moved from step to step."""
        count = self.plan.probes
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self.step)
        offsets = torch.rand(count, generator=generator)
        return ((torch.arange(count) + offsets) * (length / count)).long().clamp(max=length - 1).to(self.device)

    @torch.no_grad()
    def _balance(self, out: Output, progress: float) -> dict[str, Tensor]:
        """Experts that were chosen too often are chosen less, and the other way round; still at the end."""
        pace = self.plan.balance * min(1.0, 4 * (1 - progress))
        most = []
        for layer, step in zip(self.model.layers, out.steps, strict=True):
            if isinstance(layer.mlp, Moe) and step.load is not None:
                load = step.load.float() / step.load.float().mean()
                layer.mlp.gate.e_score_correction_bias += pace * torch.sign(1 - load)
                most.append(load.max())
        return {"fullest": torch.stack(most).max()} if most else {}

    # ---- state

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "step": self.step,
            "tokens": self.tokens,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        for optimiser, saved in zip(self.optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        self.step, self.tokens = state["step"], state["tokens"]


def save(path: Path, state: dict[str, Any]) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".part")
    torch.save(state, scratch)
    scratch.replace(path)


def _shifted(ids: Tensor, worth: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Targets `by` tokens ahead; the last rows have none."""
    targets, weights = ids.roll(-by, 1), worth.roll(-by, 1)
    weights = torch.cat([weights[:, :-by], torch.zeros_like(weights[:, :by])], dim=1)
    if by == 2:  # a draft after the end of a conversation foretells nothing
        weights = weights * (worth.roll(-1, 1) > 0)
    return targets, weights
