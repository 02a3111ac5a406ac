"""The figures at the end of a reply: usage as OpenAI counts, timings under llama.cpp's names, and our own block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from tfglm.engine.api import Finished, Timings, Usage


class TokenDigest:
    """SHA-256 over the reply's token ids (little-endian, 4 bytes each): equal digests are equal replies."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self._hash.update(token.to_bytes(4, "little"))

    def hex(self) -> str:
        return self._hash.hexdigest()


def usage_block(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def timings_block(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Milliseconds and rates to the third decimal; a rate of 0 means "too short to tell". The first token belongs to
    the prompt, so n tokens take n - 1 gaps.
    """
    read, gaps = usage.prompt_tokens - usage.cached_tokens, max(usage.completion_tokens - 1, 0)
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": read,
        "prompt_ms": round(timings.prompt_ms, 3),
        "prompt_per_token_ms": _ratio(timings.prompt_ms, read),
        "prompt_per_second": _ratio(1000.0 * read, timings.prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": round(timings.predicted_ms, 3),
        "predicted_per_token_ms": _ratio(timings.predicted_ms, gaps),
        "predicted_per_second": _ratio(1000.0 * gaps, timings.predicted_ms),
        "draft_n": usage.drafted_tokens,
        "draft_n_accepted": usage.accepted_tokens,
        "drafts": {count.source: {"drafted": count.drafted, "accepted": count.accepted} for count in usage.drafts},
        "queue_ms": round(timings.queue_ms, 3),
        "ttft_ms": round(timings.first_token_ms, 3),
    }


def closing_fields(finished: Finished, digest: TokenDigest) -> dict[str, Any]:
    """What rides on the reply (or on the last chunk of a stream) beside usage."""
    usage = finished.usage
    own = {"drafted": usage.drafted_tokens, "accepted": usage.accepted_tokens, "token_sha": digest.hex()}
    return {"timings": timings_block(usage, finished.timings), "tfglm": own}


def _ratio(a: float, b: float) -> float:
    return round(a / b, 3) if b > 0 else 0.0
