"""Batches from worker processes: block n of a mixture is always the same, whoever makes it and whenever."""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from training.data.mixture import MIXTURES, Mixture
from training.data.pack import Tokens, Weights, rows

_BLOCK_TOKENS = 1 << 19
_tokenizer: Tokenizer | None = None


def _start(tokenizer_json: str) -> None:
    global _tokenizer
    _tokenizer = Tokenizer.from_str(tokenizer_json)


def block(mixture: str, row: int, seed: int, number: int) -> tuple[Tokens, Weights]:
    """Rows of block `number`; made in a worker."""
    assert _tokenizer is not None, "a worker starts with its tokenizer"
    kind = MIXTURES[mixture]
    kind = Mixture(kind.name, row, kind.characters, kind.recalled)
    return rows(_tokenizer, f"{mixture} {seed} {number}", kind, max(8, _BLOCK_TOKENS // row))


@dataclass
class Place:
    """Where a mixture's reading has got to: the next row is `row` of block `number`."""

    number: int = 0
    row: int = 0


class _Here(Executor):
    """Makes a block when it is asked for, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


class Feed:
    """Rows of mixtures, in order, from `workers` processes that stay `ahead` blocks ahead; 0 workers: from this one."""

    def __init__(self, tokenizer_json: str, seed: int, workers: int, ahead: int = 24) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._pool: Executor
        if workers:
            spawned = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, spawned, initializer=_start, initargs=(tokenizer_json,))
        else:
            _start(tokenizer_json)
            self._pool = _Here()
        self._seed, self._ahead = seed, ahead if workers else 1
        self.places: dict[str, Place] = {}
        self._waiting: dict[str, deque[Future[tuple[Tokens, Weights]]]] = {}
        self._block: dict[str, tuple[Tokens, Weights]] = {}

    def take(self, mixture: str, row: int, count: int) -> tuple[Tokens, Weights]:
        """The next `count` rows [count, row] and their weights."""
        key = f"{mixture}/{row}"
        place = self.places.setdefault(key, Place())
        parts: list[tuple[Tokens, Weights]] = []
        while count:
            if key not in self._block:
                self._block[key] = self._next(key, mixture, row, place)
            tokens, weights = self._block[key]
            part = slice(place.row, place.row + count)
            parts.append((tokens[part], weights[part]))
            count -= len(parts[-1][0])
            place.row += len(parts[-1][0])
            if place.row == len(tokens):
                del self._block[key]
                place.number, place.row = place.number + 1, 0
        return np.concatenate([t for t, _ in parts]), np.concatenate([w for _, w in parts])

    def prepare(self, mixture: str, row: int) -> None:
        """Begin with a mixture before it is needed."""
        key = f"{mixture}/{row}"
        place = self.places.setdefault(key, Place())
        self._fill(key, mixture, row, place)

    def _next(self, key: str, mixture: str, row: int, place: Place) -> tuple[Tokens, Weights]:
        self._fill(key, mixture, row, place)
        made = self._waiting[key].popleft().result(timeout=300)
        self._fill(key, mixture, row, Place(place.number + 1))
        return made

    def _fill(self, key: str, mixture: str, row: int, place: Place) -> None:
        waiting = self._waiting.setdefault(key, deque())
        while len(waiting) < self._ahead:
            number = place.number + len(waiting)
            waiting.append(self._pool.submit(block, mixture, row, self._seed, number))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
