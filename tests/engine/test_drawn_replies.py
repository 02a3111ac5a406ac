"""A model that draws its tokens itself gives the replies of one that hands out its logits."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from fake_model import FakeModel
from harness import EOS, LIMIT, TOKENIZER, Receiver, ask, request

from tfglm.drafts.costs import Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import Failed, GenerationRequest
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.ops.draw import Draw
from tfglm.settings import Settings

WORD = (1 << 64) - 1
COLUMNS = TOKENIZER.vocab_size + 12


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def drawn(row: np.ndarray, draw: Draw) -> int:
    """Token by token, in plain floats: what a Draw means."""
    values = [float(value) for value in row[: draw.vocabulary]]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if not math.isfinite(values[order[0]]):
        return -1
    if draw.temperature == 0:
        return order[0]
    scaled = [value / draw.temperature for value in values]
    order = order[: draw.top_k or None]
    masses = [math.exp(scaled[token] - scaled[order[0]]) for token in order]
    if draw.top_p < 1:
        need, sums = draw.top_p * math.fsum(masses), np.cumsum(masses)
        order = order[: 1 + int(np.searchsorted(sums, need))]
    order = [token for token in order if scaled[token] >= scaled[order[0]] + draw.log_min_p]

    def score(token: int) -> float:
        uniform = (mix(draw.key ^ token) >> 11) * 2.0**-53 + 2.0**-54
        return scaled[token] - math.log(-math.log(uniform))

    return max(order, key=score)


class DrawingModel(FakeModel):
    """Keeps its logits to itself where every row of a window has a Draw."""

    def __init__(self) -> None:
        super().__init__(COLUMNS)
        self.kinds: list[tuple[int, int]] = []
        """Of every window: rows drawn, rows handed out."""

    def forward_drawn(self, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
        logits = self.forward(window)
        assert len(draws) == len(logits)
        tokens = [draw and drawn(row, draw) for row, draw in zip(logits.numpy(), draws, strict=True)]
        self.kinds.append((sum(map(bool, draws)), draws.count(None)))
        return Passed(logits if None in draws else torch.empty(0, COLUMNS), None, {}, tokens)


def replies(model: FakeModel, asked: Sequence[GenerationRequest], drafting: Drafting | None = None) -> list[Receiver]:
    engine = Engine(model, TOKENIZER, Settings(parallel=4, prefill_rows=16), EOS, drafting)
    engine.start()
    receivers = [ask(engine, one) for one in asked]
    assert all(receiver.last for receiver in receivers) and engine.stop(LIMIT)
    return receivers


def mixed(count: int, seed: int) -> list[GenerationRequest]:
    """Requests of which some can be drawn by the model and some need the sampler."""
    dice = random.Random(seed)
    asked = []
    for number in range(count):
        fields: dict[str, Any] = {
            "temperature": dice.choice([0.0, 0.7, 1.0, 3.0]), "top_p": dice.choice([1.0, 0.9, 0.3]),
            "top_k": dice.choice([0, 1, 5, 60]), "min_p": dice.choice([0.0, 0.05]), "seed": dice.randrange(1000),
        }  # fmt: skip
        if number % 3 == 0:
            name, value = dice.choice(
                [("logprobs", 2), ("min_tokens", 3), ("logit_bias", {7: 4.0}), ("presence_penalty", 0.5)]
            )
            fields[name] = value
        prompt = [dice.randrange(300) for _ in range(dice.randrange(1, 40))]
        asked.append(request(f"r{number}", prompt, dice.randrange(1, 30), **fields))
    return asked


@pytest.mark.parametrize("drafts", [False, True])
def test_the_replies_of_the_sampler(drafts: bool) -> None:
    asked = mixed(60, seed=drafts)
    plain, drawing = FakeModel(COLUMNS), DrawingModel()
    drafting = Drafting(Speculator(None, Policy(Costs((1.0,) * 16)), copy=True, vocab_size=COLUMNS)) if drafts else None
    got, want = replies(drawing, asked, drafting), replies(plain, asked)
    assert [one.ids for one in got] == [one.ids for one in want]
    assert [one.logprobs for one in got] == [one.logprobs for one in want]
    assert any(handed == 0 for _, handed in drawing.kinds) and any(by and handed for by, handed in drawing.kinds)
    assert drawing.empty


def test_a_row_without_a_token_ends_its_reply_alone() -> None:
    class Broken(DrawingModel):
        def forward_drawn(self, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
            passed = super().forward_drawn(window, taps, draws)
            bad = [rows.stream.length == 9 for rows in window for _ in range(rows.want)]
            tokens = [-1 if wrong else token for wrong, token in zip(bad, passed.tokens, strict=True)]
            return Passed(passed.logits, None, {}, tokens)

    asked = [request("short", [5, 6, 7], 4, ignore_eos=True), request("long", [5, 6, 8], 12, ignore_eos=True)]
    short, long = replies(Broken(), asked)
    assert short.finished and len(short.ids) == 4
    assert isinstance(long.last, Failed) and long.last.code == "E_LOGITS" and "position 9" in long.last.message
