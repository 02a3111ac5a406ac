"""What the server says to the engine and hears back: plain data, no torch.

Data flow: the server builds a `GenerationRequest` and calls `EnginePort.submit(request, on_event)`. The engine calls
`on_event` from its own thread with, in this order, `Started`, `Progress` (once a prompt chunk), `PromptLogprobs` (if
asked for), `Delta` (once a committed round), and exactly one of `Finished` or `Failed`. After that nothing follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tfglm.errors import TfglmError

FinishReason = Literal["stop", "length", "cancelled"]
Channel = Literal["reasoning", "answer"]
EngineState = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class SamplingParams:
    """How a token is drawn from a row of logits. temperature 0 is greedy (highest logit, lowest id).

    Order of application: repetition, frequency and presence penalty, logit_bias, then temperature, top_k, top_p, min_p.
    top_k 0 and min_p 0 and top_p 1 are off. seed None means: derive one from the prompt.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt and how its reply is to be made. Token counts include reasoning.

    max_tokens has been cut to the window by the caller; 0 is allowed with prompt_logprobs only.
    stop strings are matched on the answer channel only. starts_in_reasoning comes from the rendered prompt's tail.
    split_reasoning False (raw completions): everything is answer and think markup is ordinary text.
    """

    id: str
    prompt: Sequence[int]
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    split_reasoning: bool = True
    starts_in_reasoning: bool = False
    logprobs: int | None = None
    """Alternatives to report beside each chosen token (0..20), None for no logprobs at all."""
    prompt_logprobs: int | None = None
    draft: bool = True


@dataclass(frozen=True)
class TokenLogprob:
    """Natural-log probability of one token under the raw (temperature 1, no penalties) distribution."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) by descending logprob, ties to the lower id."""


@dataclass(frozen=True)
class DraftCount:
    """Drafts of one source ("mtp", "copy-prompt", ...) that were verified, and those of them that were right.

    slot: the place in the draft that is counted, from 0; None for all of them together.
    """

    source: str
    drafted: int
    accepted: int
    slot: int | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    drafts: tuple[DraftCount, ...] = ()
    """Of this reply, by source."""


@dataclass(frozen=True)
class Timings:
    """Milliseconds. queue: submit to start; prompt: start to first token; predicted: first token to last."""

    queue_ms: float
    prompt_ms: float
    predicted_ms: float
    first_token_ms: float
    """Submit to first token."""


@dataclass(frozen=True)
class Started:
    """The request left the queue."""

    queue_ms: float


@dataclass(frozen=True)
class Progress:
    """Prompt rows done so far, of all of them."""

    processed: int
    total: int


@dataclass(frozen=True)
class PromptLogprobs:
    """One entry a prompt token; the first is None (nothing precedes it)."""

    entries: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True)
class Delta:
    """Text that became final, with the tokens committed since the last Delta.

    text may be empty while a partial character or a possible stop string is held back; it never splits a character.
    token_ids and logprobs (same length when logprobs were asked for) include tokens that print nothing.
    """

    channel: Channel
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True)
class Finished:
    reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token id that ended the reply; None for eos and length."""
    usage: Usage
    timings: Timings


@dataclass(frozen=True)
class Failed:
    """The request ended without a reply; the engine goes on."""

    code: str
    message: str


Event = Started | Progress | PromptLogprobs | Delta | Finished | Failed


class QueueFullError(TfglmError):
    """The bounded queue is full: come back after `retry_after` seconds."""

    code = "E_QUEUE"

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NotServingError(TfglmError):
    """The engine is loading, draining or has failed."""

    code = "E_NOT_SERVING"


class ContextLengthError(TfglmError):
    """Prompt and reply do not fit the window."""

    code = "E_CONTEXT"


@dataclass(frozen=True)
class Snapshot:
    """What the engine is doing now; counters only ever grow. Cheap: read from any thread at any time."""

    state: EngineState
    running: int
    waiting: int
    step_age_s: float
    """Seconds since the step in progress began; 0 when idle."""
    context: int
    """Window of one request in tokens."""
    kv_tokens_used: int
    kv_tokens_total: int
    """Of what running requests and kept prompt states may use together."""
    prompt_tokens: int
    """Counted when a prompt has been read completely."""
    generation_tokens: int
    iteration_tokens: int
    """Rows of every forward, prompt chunks included."""
    rounds: int
    """Forwards that made tokens of replies."""
    chunks: int = 0
    """Forwards that read a part of a prompt."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    kept_tokens: int = 0
    """Of prompts and replies that are kept for others that begin alike."""
    drafts: tuple[DraftCount, ...] = ()
    """By source and slot."""


class EnginePort(Protocol):
    """The engine as the server sees it. Every method may be called from any thread and returns at once."""

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request. Raises QueueFullError, NotServingError or ContextLengthError before any event."""
        ...

    def cancel(self, request_id: str) -> None:
        """End a request between two rounds or prompt chunks; it then gets Finished("cancelled"). Unknown ids: no-op."""
        ...

    def drain(self) -> None:
        """Refuse new requests from now on; the running and queued ones go on."""
        ...

    def snapshot(self) -> Snapshot: ...
