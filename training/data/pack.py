"""Conversations as rows of tokens with the weight of each token in the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.data.conversation import render
from training.data.mixture import Mixture, conversation

Tokens = npt.NDArray[np.uint16]
Weights = npt.NDArray[np.uint8]
PROMPT, REPLY = 1, 2
"""Weights of tokens, beside 0 for padding; what they are worth is the trainer's to say."""
_BATCH = 256


class Marker:
    """Tells reply from prompt: a reply runs from after <think> to the role token that ends it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        def id_of(token: str) -> int:
            found = tokenizer.token_to_id(token)
            assert found is not None, f"the tokenizer has no {token}"
            return int(found)

        self.pad = id_of("<|endoftext|>")
        self.assistant = id_of("<|assistant|>")
        self.think, self.unthink = id_of("<think>"), id_of("</think>")
        self.roles = [id_of(f"<|{role}|>") for role in ("user", "observation", "system")]

    def weights(self, ids: Tokens) -> Weights:
        """Of each token as one to be predicted: REPLY for what the model writes, PROMPT for what it reads.

        <think>, and </think> where nothing is thought, come from the prompt: 0. A reply without thinking in a
        conversation that has thinking elsewhere is one whose thinking a client left out, so it is read, not written.
        """
        result = np.full(len(ids), PROMPT, np.uint8)
        starts = np.flatnonzero(ids == self.assistant)
        ends = np.flatnonzero(np.isin(ids, self.roles))
        thinks = [bool(start + 2 < len(ids) and ids[start + 2] != self.unthink) for start in starts]
        for start, thought in zip(starts, thinks, strict=True):
            result[start + 1] = 0  # <think>
            if not thought:
                result[start + 2] = 0  # </think>
            if thought or not any(thinks):
                end = ends[np.searchsorted(ends, start)]
                result[start + (2 if thought else 3) : end + 1] = REPLY
        return result


def documents(tokenizer: Tokenizer, seed: int | str, mixture: Mixture) -> Iterator[Tokens]:
    """Endless conversations as token ids, the same for the same seed."""
    rng = Random(seed)
    while True:
        texts = [render(conversation(rng, mixture)) for _ in range(_BATCH if mixture.row <= 2048 else 32)]
        for encoded in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
            yield np.array(encoded.ids, np.uint16)


def rows(
    tokenizer: Tokenizer, seed: int | str, mixture: Mixture, count: int, open_rows: int = 24
) -> tuple[Tokens, Weights]:
    """count rows [count, mixture.row]: whole conversations, padded at the end. One too long for a row is left out; each
    goes into the first open row that has room, and the fullest row is closed when none has."""
    marker = Marker(tokenizer)
    tokens = np.full((count, mixture.row), marker.pad, np.uint16)
    weights = np.zeros((count, mixture.row), np.uint8)
    opened: list[list[Tokens]] = [[] for _ in range(min(open_rows, count))]
    used = [0] * len(opened)
    closed = 0
    for ids in documents(tokenizer, seed, mixture):
        if len(ids) > mixture.row:
            continue
        at = next((n for n, size in enumerate(used) if size + len(ids) <= mixture.row), None)
        if at is None:
            at = int(np.argmax(used))
            _close(tokens[closed], weights[closed], opened[at], marker)
            closed += 1
            if closed == count:
                return tokens, weights
            opened[at], used[at] = [], 0
        opened[at].append(ids)
        used[at] += len(ids)
    raise AssertionError("documents never end")


def _close(tokens: Tokens, weights: Weights, parts: Sequence[Tokens], marker: Marker) -> None:
    at = 0
    for ids in parts:
        tokens[at : at + len(ids)] = ids
        weights[at : at + len(ids)] = marker.weights(ids)
        weights[at] = 0  # nothing foretells a new conversation
        at += len(ids)
