"""What drafting costs the host in a round, and what it gains with drafts of a set acceptance. No model, no accelerator.

    PYTHONPATH=. python benchmarks/drafts_host.py --out benchmarks/results/drafts_host_cpu.json

The engine serves greedy replies of a known text at GLM-5.3's vocabulary of 154,880; a stand-in for the model answers at
once with tokens that it draws itself, as a GPU does (with the engine's sampler each token's row of logits is read on
top of that), and an oracle drafts 8 tokens of which each is right with the set probability. Milliseconds are processor
time of the engine's thread, that of the stand-in taken off. Predicted tokens a second are those of the cost table of
three DGX Sparks, beside the ideal: a policy that knows each draft's fate. Copies are measured on an edit: a reply that
repeats its prompt with 2 % of its tokens changed.

An oracle chooses nothing. What DSpark's choice of 8 tokens adds on the host is measured by itself, at the published
sizes (64 candidates a slot, tables [154880, 256], hidden 6144, with confidence head), greedy and sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tfglm.cache.pages import PAGE, PagePool, Stream, pages_for
from tfglm.checkpoint.vocabulary import build_tokenizer
from tfglm.drafts.base import Ask, Draft, Drafter, Kept
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_drafter import Table
from tfglm.drafts.candidates import CANDIDATES
from tfglm.drafts.costs import THREE_SPARKS
from tfglm.drafts.dspark import DSparkScorer
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import Event, Failed, Finished, GenerationRequest, SamplingParams, Usage
from tfglm.engine.drafting import Drafting
from tfglm.engine.engine import Engine
from tfglm.engine.guess import Guess
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.glm53 import Glm53
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows, reserve
from tfglm.ops.draw import Draw
from tfglm.ops.group import Message
from tfglm.settings import Settings

VOCAB, TEXT = 154880, 500
TOKENIZER = Tokenizer(build_tokenizer(TEXT))


class KnownText:
    """Says of each stream, whose first token is its number, the text of that number."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self.seconds = self.began = 0.0
        self.rounds = self.rows = 0
        self.ms = 0.0
        self._texts = texts
        self._pool = PagePool(pages_for(sum(len(text) + PAGE for text in texts)))
        self._number: dict[Stream, int] = {}
        self._logits = torch.zeros(64, VOCAB)
        self._hot: list[tuple[int, int]] = []

    @property
    def tokens_total(self) -> int:
        return self._pool.pages * PAGE

    @property
    def page_tokens(self) -> int:
        return PAGE

    def open_stream(self) -> Stream:
        return Stream(self._pool)

    def forward(self, window: Sequence[Rows]) -> torch.Tensor:
        start = time.thread_time()
        for place in self._hot:
            self._logits[place] = 0
        self._hot = list(enumerate(self._next(window)))
        for place in self._hot:
            self._logits[place] = 9
        logits = self._logits[: len(self._hot)]
        self.seconds += time.thread_time() - start
        return logits

    def _next(self, window: Sequence[Rows]) -> list[int]:
        """The token after every wanted row."""
        self.began = self.began or time.thread_time()
        reserve(window, self._pool)
        found = []
        for entry in window:
            stream = entry.stream
            if stream.length == 0:
                self._number[stream] = entry.tokens[0]
            stream.length += len(entry.tokens)
            text = self._texts[self._number[stream]]
            for at in range(stream.length - entry.want, stream.length):
                found.append(text[at + 1] if at + 1 < len(text) else 0)
        if all(len(entry.tokens) == entry.want for entry in window):
            self.rounds += 1
            self.rows += len(found)
            self.ms += THREE_SPARKS.window(len(found))
        return found

    def forward_tapped(self, window: Sequence[Rows], taps: Taps) -> Passed:
        raise RuntimeError("the oracle taps nothing, so the engine has no reason to ask for taps")


class DrawnText(KnownText):
    """Draws the tokens itself, as a GPU does."""

    def forward_drawn(self, window: Sequence[Rows], taps: Taps, draws: Sequence[Draw | None]) -> Passed:
        start = time.thread_time()
        passed = Passed(torch.empty(0, VOCAB), None, {}, tokens=self._next(window))
        self.seconds += time.thread_time() - start
        return passed


class Oracle:
    name, most, taps, planes = "oracle", 8, Taps(), ()

    def __init__(self, texts: Sequence[Sequence[int]], acceptance: float) -> None:
        self._texts, self._acceptance, self._dice = texts, acceptance, random.Random(0)

    def open(self, stream: Stream) -> list[int]:
        return []

    def read(self, kept: Sequence[Kept], passed: Passed) -> None:
        for part in kept:
            part.context.extend([part.tokens[0], len(part.tokens)] if not part.context else [len(part.tokens)])

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(ask) for ask in asks]

    def _draft(self, ask: Ask) -> Draft:
        at = sum(ask.context[1:])
        tokens = self._texts[ask.context[0]][at + 1 : at + 1 + min(8, ask.room)]
        guessed = tuple(t if self._dice.random() < self._acceptance else t + 1 for t in tokens)
        return Draft(guessed, (self._acceptance,) * len(guessed), self.name)

    def skip(self, context: list[int], tokens: Sequence[int]) -> None:
        assert not tokens, "no prompt is kept here"

    def close(self, context: list[int]) -> None:
        context.clear()

    def handlers(self, model: Glm53) -> Mapping[str, Callable[[Message], None]]:
        return {}


class Timed(Drafting):
    """Adds up the processor time inside."""

    seconds = 0.0

    def propose(self, replies: Sequence[Any]) -> list[Sequence[int]]:
        return self._timed(lambda: super(Timed, self).propose(replies))

    def settle(self, *args: Any) -> None:
        self._timed(lambda: super(Timed, self).settle(*args))

    def _timed(self, action: Callable[[], Any]) -> Any:
        start = time.thread_time()
        try:
            return action()
        finally:
            self.seconds += time.thread_time() - start


def serve(
    texts: Sequence[Sequence[int]], prompts: int, drafter: Drafter | None, copy: bool, drawn: bool = True
) -> dict[str, Any]:
    """All replies at once: host milliseconds a round, tokens a round, tokens a second by the cost table."""
    model = DrawnText(texts) if drawn else KnownText(texts)
    policy = Policy(THREE_SPARKS)
    speculator = Speculator(drafter, policy, copy=copy, vocab_size=TOKENIZER.vocab_size)
    drafting = Timed(speculator)
    engine = Engine(
        model, TOKENIZER, Settings(parallel=len(texts), prefill_rows=4096), [TOKENIZER.vocab_size - 1], drafting
    )
    usages: list[Usage] = []
    spent: list[float] = []
    done = threading.Semaphore(0)

    def on_event(event: Event) -> None:
        if isinstance(event, Failed):
            raise SystemExit(f"a reply failed: {event.message}")
        if isinstance(event, Finished):
            usages.append(event.usage)
            spent.append(time.thread_time() - model.began - model.seconds)
            done.release()

    for number, text in enumerate(texts):
        wanted = len(text) - prompts
        request = GenerationRequest(
            str(number), text[:prompts], SamplingParams(temperature=0.0), wanted, ignore_eos=True, split_reasoning=False
        )
        if number == 0:
            engine.start()
        engine.submit(request, on_event)
    for _ in texts:
        done.acquire()
    engine.stop()
    if not speculator.on:
        raise SystemExit("drafting was turned off: these are not its figures")
    tokens = sum(usage.completion_tokens - 1 for usage in usages)
    ms = model.ms + (model.rounds * THREE_SPARKS.first_ms if drafter else 0.0)
    return {
        "rounds": model.rounds,
        "tokens_per_round": round(tokens / model.rounds, 3),
        "rows_per_round": round(model.rows / model.rounds, 3),
        "drafting_ms_per_round": round(1000 * drafting.seconds / model.rounds, 4),
        "host_ms_per_round": round(1000 * spent[-1] / model.rounds, 4),
        "predicted_tok_s": round(1000 * tokens / ms, 2),
    }


def dspark_choice(temperature: float, rounds: int = 200) -> float:
    """Median milliseconds in which DSpark's 8 tokens are chosen from the candidates of their slots."""
    most, hidden, rank = 8, 6144, 256
    config = BlockConfig.from_dict(
        {
            "speculators_model_type": "dspark", "block_size": most, "mask_token_id": 154856, "draft_vocab_size": VOCAB,
            "aux_hidden_state_layer_ids": [2, 20, 39, 58, 75], "markov_rank": rank, "markov_head_type": "vanilla",
            "enable_confidence_head": True, "confidence_head_with_markov": True,
            "transformer_layer_config": {
                "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 12288, "num_attention_heads": 64,
                "num_key_value_heads": 64, "head_dim": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
                "layer_types": ["sliding_attention"] * 3, "sliding_window": 2048, "rope_parameters": {},
            },
        }
    )  # fmt: skip
    tables = [Table(torch.randn(VOCAB, rank).bfloat16()) for _ in range(2)]
    dice = np.random.default_rng(0)
    head = dice.standard_normal((1, hidden + rank), np.float32) / 100
    small = {"confidence_head.proj.weight": head, "confidence_head.proj.bias": np.zeros(1, np.float32)}
    sampling = SamplingParams(temperature=temperature, top_p=0.95)
    took = []
    for number in range(rounds):
        ids = np.sort(np.stack([dice.choice(VOCAB, CANDIDATES, replace=False) for _ in range(most)]))
        values = dice.standard_normal(ids.shape).astype(np.float32)
        rows, before = dice.standard_normal((most, hidden), np.float32), 7
        start = time.thread_time()
        score = DSparkScorer(config, tables, small, rows)
        draw = Guess(sampling, seed=1, position=number, vocab_size=VOCAB, counts=None, noise=1.0)
        for slot in range(most):
            scores, _ = score(slot, before, ids[slot], values[slot])
            before, _ = draw(ids[slot], scores, slot)
        took.append(time.thread_time() - start)
    return round(1000 * statistics.median(took), 4)


def texts_of(streams: int, length: int) -> list[list[int]]:
    dice = random.Random(1)
    return [[number, *(dice.randrange(200) for _ in range(length))] for number in range(streams)]


def ideal(acceptance: float, length: int) -> float:
    """Tokens a second of three Sparks if each round verified exactly the drafts that are right."""
    dice, tokens, ms = random.Random(0), 0, 0.0
    while tokens < length:
        right = next((i for i in range(8) if dice.random() >= acceptance), 8)
        tokens, ms = tokens + right + 1, ms + THREE_SPARKS.window(right + 1) + THREE_SPARKS.first_ms
    return round(1000 * tokens / ms, 2)


def edit(length: int) -> list[list[int]]:
    dice = random.Random(2)
    original = [0, *(dice.randrange(200) for _ in range(length))]
    return [original + [t if dice.random() > 0.02 else dice.randrange(200) for t in original[1:]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tokens", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = []
    for streams in (1, 4):
        texts = texts_of(streams, args.tokens)
        for acceptance in (0.6, 0.75, 0.9, 1.0):
            figures = serve(texts, 16, Oracle(texts, acceptance), copy=False)
            cases.append({"streams": streams, "acceptance": acceptance, **figures})
            if streams == 1:
                cases[-1]["ideal_tok_s"] = ideal(acceptance, args.tokens)
                sampled = serve(texts, 16, Oracle(texts, acceptance), copy=False, drawn=False)
                cases[-1]["host_ms_per_round_with_sampler"] = sampled["host_ms_per_round"]
    serial = serve(texts_of(1, args.tokens), 16, None, copy=False)
    copies = serve(edit(args.tokens), args.tokens + 1, None, copy=True)
    result = {
        "hardware": f"{platform.machine()}, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        "vocab": VOCAB,
        "oracle": cases,
        "serial": serial,
        "edit_with_copies": copies,
        "most_host_ms_one_stream": max(case["host_ms_per_round"] for case in cases if case["streams"] == 1),
        "dspark_choice_ms": {"greedy": dspark_choice(0.0), "temperature 1, top_p 0.95": dspark_choice(1.0)},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
