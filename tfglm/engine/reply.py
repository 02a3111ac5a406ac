"""One request from the queue to its last event: draws tokens, keeps the text, knows when it is over.

Used by the engine's thread alone; other threads only set `cancelled`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

import numpy as np

from tfglm.cache.kept import Block
from tfglm.cache.pages import Stream
from tfglm.engine.api import (
    Channel,
    Delta,
    DraftCount,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    PromptLogprobs,
    Started,
    Timings,
    TokenLogprob,
    Usage,
)
from tfglm.engine.guess import Guess
from tfglm.engine.noise import noise_key
from tfglm.engine.sampler import (
    LOWEST_TEMPERATURE,
    LogitsError,
    TokenCounts,
    choose,
    has_penalties,
    token_logprob,
)
from tfglm.engine.text import ReplyText
from tfglm.engine.tokenizer import Tokenizer
from tfglm.ops.draw import Draw

log = logging.getLogger(__name__)


class Reply:
    """The state of one request. `tokens` are the generated ids; the last one is pending: drawn, not yet cached.

    A reply is over when `ended` or `failure` is set, or once its receiver raised or it was cancelled. As in vLLM, the
    eos token counts among the completion tokens and prints nothing; a stop token id likewise, unless the request wants
    the stop in its output. Below min_tokens neither of them can be drawn, and a stop string does not end the reply.
    `pages` are the cache pages that the whole prompt and reply may come to need, `promised` those of them that are set
    aside for this reply alone. `page_keys`: of the whole pages of its prompt. `reused`: kept pages that were found for
    it, until the stream has them. `resumed`: the tokens they hold. seed: of its noise.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: Callable[[Event], None],
        tokenizer: Tokenizer,
        eos: Collection[int],
        seed: int,
    ) -> None:
        self.request = request
        self.longest = len(request.prompt) + request.max_tokens
        self.promised = 0
        self.reused: list[Block] = []
        self.page_keys: list[bytes] = []
        self.resumed = 0
        self.tokens: list[int] = []
        self.read = 0
        self.stream: Stream | None = None
        self.cancelled = False
        self.ended: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.failure: tuple[str, str] | None = None
        self.drafted = 0
        self.accepted = 0
        self.draft_counts: tuple[DraftCount, ...] = ()
        self._on_event = on_event
        self._deaf = False
        self._vocab_size = tokenizer.vocab_size
        self._eos = frozenset(eos)
        self._ends = frozenset(request.stop_token_ids) | (frozenset() if request.ignore_eos else self._eos)
        self._text = ReplyText(
            tokenizer,
            starts_in_reasoning=request.starts_in_reasoning,
            split_reasoning=request.split_reasoning,
            stop=request.stop,
            include_stop=request.include_stop_in_output,
            silent=self._eos,
        )
        self._seed = seed
        self._counts: TokenCounts | None = None
        self._prompt_logprobs: list[TokenLogprob | None] = [None]
        self._reasoning_tokens = 0
        self._fresh: list[tuple[Channel, str, int, TokenLogprob | None]] = []
        self._submitted = time.monotonic()
        self._started = self._first = self._last = 0.0

    @property
    def reading(self) -> bool:
        """Whether a part of the prompt has yet to go through the model."""
        return self.read < len(self.request.prompt)

    @property
    def cached(self) -> int:
        """Tokens of this reply in the model's cache."""
        return self.read + max(0, len(self.tokens) - 1)

    @property
    def room(self) -> int:
        """How many tokens the reply may still grow by."""
        return self.request.max_tokens - len(self.tokens)

    @property
    def over(self) -> bool:
        return self.ended is not None or self.failure is not None or self.cancelled

    def start(self, stream: Stream) -> None:
        """Leave the queue with a stream that may hold the prompt's beginning. What takes time for a long prompt is done
        here, not where the request was submitted."""
        self.stream = stream
        self.read = self.resumed = stream.length
        self._started = time.monotonic()
        prompt, params = self.request.prompt, self.request.sampling
        self._counts = TokenCounts(prompt) if has_penalties(params) else None
        self._send(Started(queue_ms=_ms(self._submitted, self._started)))

    def restored(self, tokens: int) -> None:
        """Take note of prompt tokens whose rows came from elsewhere than the model."""
        self.read += tokens
        self.resumed += tokens
        self._send(Progress(self.read, len(self.request.prompt)))

    def chunk_read(self, rows: int, logits: np.ndarray, drawn: Sequence[int | None] = ()) -> None:
        """Take note of a prompt chunk of `rows` tokens. logits: float32 [rows or 1 or 0, vocab], of its last rows.

        All rows when prompt_logprobs were asked for; else the last row of the last chunk, from which a token follows,
        unless it was drawn already.
        """
        prompt, request = self.request.prompt, self.request
        start, self.read = self.read, self.read + rows
        if request.prompt_logprobs is not None:
            for row, token in zip(logits, prompt[start + 1 : self.read + 1], strict=False):
                self._prompt_logprobs.append(token_logprob(row, token, request.prompt_logprobs, self._vocab_size))
        self._send(Progress(self.read, len(prompt)))
        if self.reading:
            return
        if request.prompt_logprobs is not None:
            self._send(PromptLogprobs(tuple(self._prompt_logprobs)))
        first = drawn[-1] if drawn else None
        if request.max_tokens == 0:
            self.ended = "length"
        elif first is not None:
            self.taken(first)
        else:
            self.take(logits[-1])

    def draw(self, ahead: int) -> Draw | None:
        """How the token is drawn that comes `ahead` tokens after the next one, for a model that can do it; None for a
        request that asks for more than a Draw says."""
        request, params = self.request, self.request.sampling
        if (
            request.logprobs is not None
            or request.prompt_logprobs is not None
            or request.min_tokens
            or params.logit_bias
            or has_penalties(params)
        ):
            return None
        greedy = params.temperature == 0 or params.top_k == 1
        return Draw(
            temperature=0.0 if greedy else max(params.temperature, LOWEST_TEMPERATURE),
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            log_min_p=math.log(params.min_p) if params.min_p > 0 else -math.inf,
            key=noise_key(self._seed, len(request.prompt) + len(self.tokens) + ahead),
            vocabulary=self._vocab_size,
        )

    def taken(self, token: int) -> int:
        """Make a token that the model drew part of the reply."""
        if token < 0:
            position = len(self.request.prompt) + len(self.tokens)
            raise LogitsError(f"the best logit at position {position} is not finite; no token can be chosen")
        self._append(token, None)
        return token

    def take(self, row: np.ndarray) -> int:
        """Draw the next token from its row of logits, float32 [vocab], and make it part of the reply."""
        request, count = self.request, len(self.tokens)
        token = choose(
            row,
            request.sampling,
            self._seed,
            len(request.prompt) + count,
            vocab_size=self._vocab_size,
            counts=self._counts,
            masked=self._ends if count < request.min_tokens else (),
        )
        logprob = None if request.logprobs is None else token_logprob(row, token, request.logprobs, self._vocab_size)
        self._append(token, logprob)
        return token

    def guess(self, noise: float) -> Guess:
        """How the tokens after the last one will be drawn, for drafters; noise: weight of the target's own."""
        request, count = self.request, len(self.tokens)
        return Guess(
            request.sampling,
            seed=self._seed,
            position=len(request.prompt) + count,
            vocab_size=self._vocab_size,
            counts=self._counts,
            noise=noise,
            masked=self._ends,
            unmasked=request.min_tokens - count,
        )

    def _append(self, token: int, logprob: TokenLogprob | None) -> None:
        request = self.request
        self.tokens.append(token)
        self._last = time.monotonic()
        if len(self.tokens) == 1:
            self._first = self._last
        if self._counts is not None:
            self._counts.add(token)
        channel = self._text.channel
        self._reasoning_tokens += channel == "reasoning"
        ends = token in self._ends
        text = self._text.feed(
            token,
            silent=ends and not request.include_stop_in_output,
            may_stop=len(self.tokens) >= request.min_tokens,
        )
        self._fresh.append((channel, text, token, logprob))
        if ends:
            self.ended, self.stop_reason = "stop", None if token in self._eos else token
        elif self._text.stopped_by is not None:
            self.ended, self.stop_reason = "stop", self._text.stopped_by
        elif self.room == 0:
            self.ended = "length"

    def fail(self, code: str, message: str) -> None:
        """End without a reply; the first failure counts."""
        self.failure = self.failure or (code, message)

    def send_fresh(self) -> None:
        """Deliver what was committed since the last time, one Delta a channel."""
        fresh, self._fresh = self._fresh, []
        for channel, part in groupby(fresh, key=lambda item: item[0]):
            _, texts, tokens, logprobs = zip(*part, strict=True)
            told = tuple(entry for entry in logprobs if entry is not None)
            self._send(Delta(channel, "".join(texts), tokens, told))

    def close(self) -> None:
        """Deliver the held-back text and the last event; nothing is delivered after it."""
        if self.failure is not None:
            self._send(Failed(*self.failure))
        else:
            self.send_fresh()
            rest = self._text.finish()
            if rest:
                self._send(Delta(self._text.channel, rest))
            self._send(Finished(self.ended or "cancelled", self.stop_reason, self._usage(), self._timings()))
        self._deaf = True

    def _usage(self) -> Usage:
        return Usage(
            prompt_tokens=len(self.request.prompt),
            completion_tokens=len(self.tokens),
            reasoning_tokens=self._reasoning_tokens,
            cached_tokens=self.resumed,
            drafted_tokens=self.drafted,
            accepted_tokens=self.accepted,
            drafts=self.draft_counts,
        )

    def _timings(self) -> Timings:
        """A phase that was not reached ends now, and those after it take no time."""
        now = time.monotonic()
        started = self._started or now
        first = self._first or now
        return Timings(
            queue_ms=_ms(self._submitted, started),
            prompt_ms=_ms(started, first),
            predicted_ms=_ms(first, self._last or first),
            first_token_ms=_ms(self._submitted, first),
        )

    def _send(self, event: Event) -> None:
        """Hand an event over. A receiver that raises ends its own reply and hears nothing more."""
        if self._deaf:
            return
        try:
            self._on_event(event)
        except Exception:
            log.warning("request %s: its receiver failed, so it ends", self.request.id, exc_info=True)
            self._deaf = self.cancelled = True


def _ms(start: float, end: float) -> float:
    return (end - start) * 1000.0
