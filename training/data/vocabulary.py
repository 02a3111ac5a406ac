"""The tokenizer that the training text deserves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from random import Random

from tokenizers import Tokenizer

from tfglm.checkpoint.presets import ADDED_TOKENS, PAD_COLUMNS
from tfglm.checkpoint.vocabulary import MARKUP_TOKENS, SPECIAL_TOKENS, build_tokenizer
from training.data.conversation import render
from training.data.mixture import SHORT, conversation

_MARKUP = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS + MARKUP_TOKENS))


def trained_tokenizer(vocab_size: int, seed: int = 0, conversations: int = 6000) -> Tokenizer:
    """Byte-level BPE over conversations of the mixture and the project's own text; digits stay alone."""

    def texts() -> Iterator[str]:
        rng = Random(f"vocabulary {seed}")
        for _ in range(conversations):
            yield from _MARKUP.split(render(conversation(rng, SHORT)))
        yield files("tfglm.checkpoint").joinpath("data/training_text.txt").read_text(encoding="utf-8")

    return build_tokenizer(vocab_size - ADDED_TOKENS - PAD_COLUMNS, texts(), digits=1)
