"""One small real request before the server says that it is ready."""

from __future__ import annotations

import queue

from tfglm.engine.api import Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.errors import TfglmError
from tfglm.server.state import Served

TOKENS = 4
SECONDS = 300.0


class SmokeError(TfglmError):
    """The engine started but did not answer."""

    code = "E_SMOKE"


def smoke(served: Served) -> None:
    """Template, tokenizer and engine together make a reply of up to 4 tokens. Blocks; raises SmokeError."""
    prompt = served.tokenizer.encode(served.template.render([{"role": "user", "content": "Hello"}]))
    tokens = min(TOKENS, served.info.context - len(prompt))
    if tokens < 1:
        raise SmokeError(f"a window of {served.info.context} tokens has no room for a greeting; raise --context")
    request = GenerationRequest("smoke", prompt, SamplingParams(temperature=0.0), max_tokens=tokens)
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    served.engine.submit(request, events.put)
    while True:
        try:
            event = events.get(timeout=SECONDS)
        except queue.Empty:
            raise SmokeError(f"the first request made no progress for {SECONDS:.0f} s") from None
        if isinstance(event, Failed):
            raise SmokeError(f"the first request failed: {event.code}: {event.message}")
        if isinstance(event, Finished):
            return
