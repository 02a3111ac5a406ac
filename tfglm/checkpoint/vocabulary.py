"""The tokenizer of a small checkpoint: byte-level BPE trained on the project's own text, in GLM-5.3's form.

Same pre-tokenizer rules, same 36 added tokens in the same order at the end of the vocabulary, nothing added by the
post-processor. The trainer breaks ties by token id, so the result is the same on every run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
)
"""The first added tokens, marked special: skipped by decoders that skip special tokens."""

MARKUP_TOKENS = (
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""The added tokens after them, not marked special: thinking and tool markup must survive decoding."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Contractions, words with one leading mark, digits in runs of some length, punctuation, line ends, spaces."""

_TRAINED_TOKENS = 1476
"""Tokens the training text is good for; a larger vocabulary is filled up with made-up words."""


def build_tokenizer(base_size: int, text: Iterable[str] | None = None, *, digits: int = 3) -> Tokenizer:
    """A tokenizer with `base_size` (at least 256) ordinary tokens and the added tokens right after them.

    text: what it is trained on, by default the project's own short text. digits: how many may be one token; GLM-5.3 has
    up to three, a model that learns to reckon from scratch does better with single ones.
    """
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT % digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=base_size if text is not None else min(base_size, _TRAINED_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_text() if text is None else text, trainer)
    _fill(tokenizer, base_size)
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKUP_TOKENS])
    return tokenizer


def tokenizer_config(model_max_length: int) -> dict[str, Any]:
    """tokenizer_config.json, as GLM-5.3 has it."""
    return {
        "backend": "tokenizers",
        "clean_up_tokenization_spaces": False,
        "do_lower_case": False,
        "eos_token": "<|endoftext|>",
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": model_max_length,
        "pad_token": "<|endoftext|>",
        "padding_side": "left",
        "remove_space": False,
        "tokenizer_class": "TokenizersBackend",
    }


def _training_text() -> Iterator[str]:
    text = files("tfglm.checkpoint").joinpath("data/training_text.txt").read_text(encoding="utf-8")
    yield from text.splitlines(keepends=True)


def _fill(tokenizer: Tokenizer, base_size: int) -> None:
    """Add words no text encodes to, so that the added tokens get the ids a vocabulary of this size gives them."""
    model = json.loads(tokenizer.to_str())["model"]
    vocab = model["vocab"]
    for number in range(len(vocab), base_size):
        vocab[f"Ġ~{number}"] = number  # Ġ is the byte-level letter of a space
    merges = [(left, right) for left, right in model["merges"]]
    tokenizer.model = models.BPE(vocab=vocab, merges=merges, ignore_merges=True)
