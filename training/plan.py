"""What is trained when: phases by share of the budget, learning rates, loss weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """Up to `end` (share of the budget): batches of `rows` rows of `length` tokens; sparse: attention follows the
    indexer's selection."""

    mixture: str
    length: int
    rows: int
    end: float
    sparse: bool = False


@dataclass(frozen=True)
class Plan:
    """Learning rates hold until `decay_from`, then fall linearly to `last_lr` of themselves at 1. The indexer learns
    from `probes` rows of every sequence. Prompts count `prompt_weight` of replies."""

    phases: tuple[Phase, ...]
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.05
    warmup: float = 0.01
    decay_from: float = 0.45
    last_lr: float = 0.02
    mtp_weight: float = 0.3
    prompt_weight: float = 0.1
    probes: int = 32
    room: float | None = 1.6
    balance: float = 0.002

    def phase(self, progress: float) -> Phase:
        return next((phase for phase in self.phases if progress < phase.end), self.phases[-1])

    def lr(self, progress: float) -> float:
        if progress < self.warmup:
            return max(progress / self.warmup, 0.02)
        fallen = max(0.0, (progress - self.decay_from) / (1 - self.decay_from))
        return 1 - fallen * (1 - self.last_lr)


TINY = Plan(
    (
        Phase("short", 2048, 32, 0.62),
        Phase("long", 16384, 4, 0.8),
        Phase("sparse", 8192, 8, 1.0, sparse=True),
    )
)
SMOKE = Plan(
    tuple(
        Phase(p.mixture, p.length, p.rows, end, p.sparse) for p, end in zip(TINY.phases, (0.5, 0.75, 1.0), strict=True)
    )
)
"""All shapes of TINY in a minute: to measure speed, and to fill the compiler's cache."""
MICRO = Plan(
    (Phase("short", 256, 4, 0.7), Phase("short", 256, 4, 1.0, sparse=True)),
    probes=8, room=None,
)  # fmt: skip
PLANS = {"tiny": TINY, "smoke": SMOKE, "micro": MICRO}
