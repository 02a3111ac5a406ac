"""One small real request before the server says that it is ready."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

from tfglm.engine.api import Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.errors import ConfigError, TfglmError
from tfglm.server.state import Served

if TYPE_CHECKING:
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.server.template import ChatTemplate

TOKENS = 4
SECONDS = 300.0


class SmokeError(TfglmError):
    """The engine started but did not answer."""

    code = "E_SMOKE"


def greeting(tokenizer: Tokenizer, template: ChatTemplate, context: int) -> list[int]:
    """The ids of a shortest chat. Raises ConfigError when `context` tokens have no room for it and a reply."""
    prompt = tokenizer.encode(template.render([{"role": "user", "content": "Hello"}]))
    if len(prompt) + TOKENS > context:
        raise ConfigError(
            f"--context is {context}; the shortest chat of this checkpoint's template takes {len(prompt)} tokens and "
            f"the reply that is tried {TOKENS}: at least {len(prompt) + TOKENS} are needed"
        )
    return prompt


def smoke(served: Served) -> None:
    """Template, tokenizer and engine together make a reply of up to 4 tokens. Blocks; raises SmokeError."""
    prompt = greeting(served.tokenizer, served.template, served.info.context)
    request = GenerationRequest("smoke", prompt, SamplingParams(temperature=0.0), max_tokens=TOKENS)
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
