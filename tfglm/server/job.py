"""A checked request for a reply: what chat and raw completions have in common on the way to the engine and back."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tfglm import __version__
from tfglm.engine.api import Event, Failed, Finished, GenerationRequest
from tfglm.server.errors import ApiError, unavailable
from tfglm.server.sampling import check_min_tokens, sampling_params, stop_strings, token_ids
from tfglm.server.schemas import ReplyFields
from tfglm.server.state import Served
from tfglm.server.stream import DONE, failure, sse
from tfglm.server.usage import TokenDigest, closing_fields, usage_block

FINGERPRINT = f"tfglm-{__version__}"


@dataclass(frozen=True)
class Job:
    """What the engine gets, and how the reply is sent."""

    request: GenerationRequest
    model: str
    created: int
    stream: bool
    include_usage: bool

    def header(self, kind: str) -> dict[str, Any]:
        """The fields that every object and chunk of the reply begins with."""
        return {
            "id": self.request.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
        }

    def closing(self, kind: str, choice: dict[str, Any], end: Finished, digest: TokenDigest) -> bytes:
        """The last events of a stream: `choice` with the figures of the reply, usage if it was asked for, [DONE]."""
        if end.reason == "cancelled":
            return failure(Failed("cancelled", "the reply was cancelled"))
        last = {**self.header(kind), "choices": [choice], **closing_fields(end, digest)}
        if not self.include_usage:
            return sse(last) + DONE
        usage = {**self.header(kind), "choices": [], "usage": usage_block(end.usage)}
        return sse({**last, "usage": None}) + sse(usage) + DONE


def make_job(
    served: Served, body: ReplyFields, prefix: str, prompt: Sequence[int], max_tokens: int, **fields: Any
) -> Job:
    """prefix: of the reply's id. fields: those of GenerationRequest that not every kind of request has."""
    vocab_size = served.tokenizer.vocab_size
    request = GenerationRequest(
        id=f"{prefix}-{uuid.uuid4().hex}",
        prompt=prompt,
        sampling=sampling_params(body, served.info.defaults, vocab_size),
        max_tokens=max_tokens,
        min_tokens=check_min_tokens(body.min_tokens, max_tokens),
        stop=stop_strings(body.stop),
        stop_token_ids=token_ids(body.stop_token_ids or (), vocab_size, "stop_token_ids"),
        include_stop_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        draft=body.draft is not False,
        **fields,
    )
    return Job(
        request=request,
        model=served.info.name,
        created=int(time.time()),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
    )


def finished_or_error(end: Event | None) -> Finished:
    """The end of a whole reply. Raises ApiError when there is none worth sending."""
    if isinstance(end, Finished) and end.reason != "cancelled":
        return end
    if isinstance(end, Failed):
        if end.code == "draining":
            raise unavailable(end.code, end.message)
        # The same request would meet the same end; clients would send it twice more.
        raise ApiError(500, end.message, code=end.code, headers={"x-should-retry": "false"})
    raise ApiError(500, "the reply was cancelled", code="cancelled")
