"""One request at the engine as the event loop sees it: batches of events in, a cancellation out if the client goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, QueueFullError, Started
from tfglm.errors import TfglmError
from tfglm.server.errors import from_engine

if TYPE_CHECKING:
    from tfglm.server.state import Served, ServerState

log = logging.getLogger("tfglm.server")


class Generation:
    """A context manager: entering submits (and raises ApiError), leaving before the end cancels.

    Events come from the engine's thread and wait in a deque; their number is bounded by max_tokens, their time by the
    writer's patience with a slow reader.
    """

    def __init__(self, state: ServerState, served: Served, request: GenerationRequest) -> None:
        self.request = request
        self._state, self._engine = state, served.engine
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[float, Event]] = deque()
        self._wake_scheduled = False
        self._waiter: asyncio.Future[None] | None = None
        self._begin = self._last = time.monotonic()
        self._tokens = 0
        self._complete = False
        self.ended = False

    def __enter__(self) -> Generation:
        try:
            self._engine.submit(self.request, self._put)
        except TfglmError as error:
            if isinstance(error, QueueFullError):
                self._state.metrics.count("queue_full")
            raise from_engine(error) from None
        self._state.live.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._state.live.discard(self)
        if not self.ended:
            self._engine.cancel(self.request.id)
            self._state.metrics.count("disconnected")
            log.info("%s: the client left after %d tokens; cancelled", self.request.id, self._tokens)

    async def next(self, timeout: float | None = None) -> list[Event]:
        """The events that have come since the last call, at least one; none only after `timeout` seconds."""
        if not self._events:
            self._waiter = self._loop.create_future()
            timer = None if timeout is None else self._loop.call_later(max(timeout, 0.0), self._release)
            try:
                await self._waiter
            finally:
                self._waiter = None
                if timer is not None:
                    timer.cancel()
        batch: list[Event] = []
        while self._events and not self.ended:
            when, event = self._events.popleft()
            if self._complete and isinstance(event, Finished) and event.reason == "cancelled":
                event = replace(event, reason="stop")
            self._observe(when, event)
            batch.append(event)
        return batch

    def complete(self) -> None:
        """Nothing more is wanted of the reply: it ends after the step in progress, as if the model had ended it."""
        if not self._complete:
            self._complete = True
            self._engine.cancel(self.request.id)

    def fail(self, code: str, message: str) -> None:
        """Ends the reply from this side; called from the event loop."""
        self._engine.cancel(self.request.id)
        self._events.append((time.monotonic(), Failed(code, message)))
        self._release()

    def _put(self, event: Event) -> None:
        """Called by the engine's thread; must neither block nor raise."""
        self._events.append((time.monotonic(), event))
        if self._wake_scheduled:
            return
        self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake)
        except RuntimeError:
            log.debug("%s: the server stopped before its reply ended", self.request.id)

    def _wake(self) -> None:
        # The flag falls before the deque is read, so an event that comes in between schedules another wake.
        self._wake_scheduled = False
        self._release()

    def _release(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _observe(self, when: float, event: Event) -> None:
        metrics = self._state.metrics
        if isinstance(event, Delta) and event.token_ids:
            if not self._tokens:
                metrics.first_token(when - self._begin)
            else:
                metrics.tokens(len(event.token_ids), when - self._last)
            self._tokens += len(event.token_ids)
            self._last = when
        elif isinstance(event, Started):
            metrics.started(event.queue_ms / 1000)
        elif isinstance(event, Finished):
            self.ended = True
            metrics.finished(event, when - self._begin)
            usage, seconds = event.usage, when - self._begin
            form = "%s: %s after %.2f s, %d prompt and %d reply tokens"
            log.info(form, self.request.id, event.reason, seconds, usage.prompt_tokens, usage.completion_tokens)
        elif isinstance(event, Failed):
            self.ended = True
            log.warning("%s: failed: %s: %s", self.request.id, event.code, event.message)
