"""The engine: one thread that carries requests from the queue through the model to their last event."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

import numpy as np

from tfglm.engine.api import (
    ContextLengthError,
    EngineState,
    Event,
    GenerationRequest,
    NotServingError,
    Snapshot,
)
from tfglm.engine.drafting import Drafting
from tfglm.engine.model import Model
from tfglm.engine.noise import derived_seed
from tfglm.engine.reply import Reply
from tfglm.engine.round import decode, read_chunk, resume
from tfglm.engine.scheduler import Plan, Scheduler
from tfglm.engine.states import PromptStates
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import RanksError, TfglmError
from tfglm.models.window import Rows
from tfglm.settings import Settings

log = logging.getLogger(__name__)

ASSISTANT = "<|assistant|>"
"""Opens the next turn: a reply that generates it is over, although the checkpoint does not list it as eos."""


class Engine:
    """Implements EnginePort over a model. `start` begins to serve; before it the state is "loading".

    Only the engine's thread touches the model, the streams and the replies' contents, and it calls every `on_event`.
    One lock guards the queue and the lists of replies; it is never held during a forward pass or a callback.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        settings: Settings,
        eos_token_ids: Collection[int],
        drafting: Drafting | None = None,
        states: PromptStates | None = None,
    ) -> None:
        """The window of one request is settings.context, or all that the model's cache holds if that is 0. Without
        `drafting` every round gives one token, without `states` every prompt is read from its start."""
        pages = model.tokens_total // model.page_tokens
        assistant = tokenizer.id_of(ASSISTANT)
        self._model = model
        self._tokenizer = tokenizer
        self._settings = settings
        self._drafting = drafting or Drafting()
        self._eos = frozenset(eos_token_ids) | (frozenset() if assistant is None else {assistant})
        self._capacity = model.tokens_total
        self._context = min(settings.context or self._capacity, self._capacity)
        self._states = states or PromptStates()
        self._drafting.when_incomplete(self._states.write_no_more)
        share = settings.prefill_share
        self._scheduler = Scheduler(
            settings.parallel, settings.max_queued, pages, self._states, share, model.page_tokens
        )
        self._replies: dict[str, Reply] = {}
        self._state: EngineState = "loading"
        self._changed = threading.Condition()
        self._stopping = False
        self._ended_by: TfglmError | None = None
        self._stepping = False
        self._step_began: float | None = None
        self._prompt_tokens = self._generation_tokens = self._iteration_tokens = self._rounds = self._chunks = 0
        self._drafted_tokens = self._accepted_tokens = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to serve."""
        with self._changed:
            if self._state == "loading":
                self._state = "ready"
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: Callable[[Event], None]) -> None:
        """Queue a request; see EnginePort. Raises ValueError for what no server should let through: an empty prompt,
        token ids that the tokenizer does not have, an id already in use."""
        prompt, sampling = np.asarray(request.prompt), request.sampling
        if not prompt.size or not 0 <= prompt.min() <= prompt.max() < self._tokenizer.vocab_size:
            raise ValueError(f"a prompt needs one or more token ids from 0 to {self._tokenizer.vocab_size - 1}")
        prompt = prompt.astype("<u4")
        total = len(prompt) + request.max_tokens
        if total > self._context:
            raise ContextLengthError(
                f"This model's maximum context length is {self._context} tokens. However, you requested {total} tokens "
                f"({len(prompt)} in the messages, {request.max_tokens} in the completion). Please reduce the length of "
                "the messages or completion."
            )
        seed = derived_seed(prompt, self._settings.seed_salt) if sampling.seed is None else sampling.seed
        reply = Reply(request, on_event, self._tokenizer, self._eos, seed)
        reply.page_keys = self._states.keys(prompt)  # here: the lock is not yet held, and other replies go on
        with self._changed:
            if self._state != "ready":
                raise NotServingError(f"the engine takes no requests: its state is {self._state}")
            if request.id in self._replies:
                raise ValueError(f"request id {request.id!r} is in use")
            self._scheduler.add(reply)
            self._replies[request.id] = reply
            self._changed.notify_all()

    def cancel(self, request_id: str) -> None:
        with self._changed:
            reply = self._replies.get(request_id)
            if reply is not None:
                self._scheduler.withdraw(reply)
                self._changed.notify_all()

    def drain(self) -> None:
        with self._changed:
            if self._state in ("loading", "ready"):
                self._state = "draining"

    def wait_idle(self, timeout: float) -> bool:
        """Wait until nothing runs or waits and every last event has been delivered; False after `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._scheduler.idle and not self._stepping, timeout)

    def stop(self, timeout: float = 30.0) -> bool:
        """End the thread after the step in progress; every reply that is left fails with E_NOT_SERVING.

        Returns False if the step did not end within `timeout` seconds; the replies have failed all the same.
        """
        self.drain()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        ended = not self._thread.is_alive()
        if ended:
            self._states.close()
            self._drafting.end()
        if not ended:
            log.error("the engine's step did not end within %.0f s of being asked to stop", timeout)
        self._fail_all(NotServingError.code, "the server stopped before the reply was finished")
        return ended

    def end(self, error: TfglmError, timeout: float = 1.0) -> None:
        """Be of no more use, because of what happened elsewhere: every reply fails with this error, at the latest after
        `timeout` seconds, in which a step in progress may end."""
        with self._changed:
            self._ended_by = error
            self._changed.notify_all()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)
        self._state = "failed"
        self._fail_all(error.code, error.message)

    def snapshot(self) -> Snapshot:
        with self._changed:
            running, waiting = len(self._scheduler.running), len(self._scheduler.waiting)
            used = sum(reply.cached for reply in self._scheduler.running)
            began = self._step_began
        return Snapshot(
            state=self._state,
            running=running,
            waiting=waiting,
            step_age_s=0.0 if began is None else time.monotonic() - began,
            context=self._context,
            kv_tokens_used=used,
            kv_tokens_total=self._capacity,
            kept_tokens=self._states.pages * self._model.page_tokens,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            iteration_tokens=self._iteration_tokens,
            rounds=self._rounds,
            chunks=self._chunks,
            drafted_tokens=self._drafted_tokens,
            accepted_tokens=self._accepted_tokens,
            drafts=self._drafting.counts,
        )

    def _run(self) -> None:
        """The thread: turn after turn until `stop`; a failure of the engine itself fails everyone and is final."""
        try:
            while self._turn():
                pass
        except BaseException as error:
            self._state = "failed"
            if isinstance(error, TfglmError):
                log.error("the engine takes no more requests: %s", error)
                self._fail_all(error.code, error.message)
            else:
                log.exception("the engine failed and takes no more requests")
                self._fail_all(TfglmError.code, f"the engine failed: {type(error).__name__}: {error}")

    def _turn(self) -> bool:
        """Wait for work, carry out one plan; False when asked to stop."""
        with self._changed:
            self._stepping = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopping or self._ended_by or not self._scheduler.idle)
            if self._ended_by:
                raise self._ended_by
            if self._stopping:
                return False
            self._stepping = True
            plan = self._scheduler.plan()
        for reply in plan.dropped:
            self._retire(reply)
        for reply in plan.admitted:
            self._admit(reply)
        began = time.monotonic()
        sound = self._step(plan)
        self._scheduler.took(plan, time.monotonic() - began)
        for reply in [reply for reply in self._scheduler.running if reply.over]:
            self._states.finished(reply)
            self._retire(reply)
        if not sound:
            self._probe()
        return True

    def _admit(self, reply: Reply) -> None:
        try:
            stream = self._model.open_stream()
            self._states.begin(reply, stream)
            reply.start(stream)
            self._drafting.start(reply)
        except Exception as error:
            log.exception("request %s: no stream could be opened", reply.request.id)
            reply.fail(*_told(error))

    def _step(self, plan: Plan) -> bool:
        """One forward pass; False if it failed, and with it every reply of its window."""
        replies = [reply for reply in ([plan.prompt] if plan.prompt else plan.decoding) if not reply.over]
        if not replies:
            return True
        self._step_began = time.monotonic()
        before = [(len(reply.tokens), reply.drafted, reply.accepted) for reply in replies]
        try:
            if plan.prompt is not None:
                if not resume(plan.prompt, self._states, self._drafting):
                    rows = self._settings.prefill_rows
                    self._iteration_tokens += read_chunk(self._model, plan.prompt, rows, self._drafting)
                    self._chunks += 1
                self._states.read(plan.prompt)
            else:
                self._iteration_tokens += decode(self._model, replies, self._drafting)
                self._rounds += 1
        except RanksError:
            raise  # there is no other forward pass to try
        except Exception as error:
            log.exception("a forward pass failed; it ends %s", ", ".join(reply.request.id for reply in replies))
            for reply in replies:
                reply.fail(*_told(error))
            return False
        finally:
            self._step_began = None
        if plan.prompt is not None and not plan.prompt.reading:
            self._prompt_tokens += len(plan.prompt.request.prompt)
        for reply, (tokens, drafted, accepted) in zip(replies, before, strict=True):
            self._generation_tokens += len(reply.tokens) - tokens
            self._drafted_tokens += reply.drafted - drafted
            self._accepted_tokens += reply.accepted - accepted
        return True

    def _probe(self) -> None:
        """After a failed forward pass: one token through a fresh stream. What it raises ends the engine."""
        stream = self._model.open_stream()
        self._model.forward([Rows(stream, [0], 1)])
        stream.close()

    def _retire(self, reply: Reply) -> None:
        """Free what a reply holds, then deliver its last event."""
        with self._changed:
            self._scheduler.remove(reply)
            self._replies.pop(reply.request.id, None)
        try:
            self._states.end(reply)
            if reply.stream is not None:
                reply.stream.close()
            self._drafting.close(reply)
        finally:
            reply.close()

    def _fail_all(self, code: str, message: str) -> None:
        """Fail every reply that is left. Their streams go down with the engine."""
        with self._changed:
            left, self._replies = list(self._replies.values()), {}
            self._scheduler.clear()
            self._stepping = False
            self._changed.notify_all()
        for reply in left:
            reply.fail(code, message)
            reply.close()


def _told(error: Exception) -> tuple[str, str]:
    """Code and message for the client of a request that the model failed."""
    if isinstance(error, TfglmError):
        return error.code, error.message
    return TfglmError.code, f"the model failed on this request: {type(error).__name__}: {error}"
