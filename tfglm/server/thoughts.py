"""Calls in a think block that the model never closes: some replies end there, and the calls at their end are meant.

Calls that are followed by more thinking, or by the end of the block, were only thought of. So text that may be such
calls is held until it shows; the rest of the reasoning flows on.
"""

from __future__ import annotations

from tfglm.server.markup import OPEN, partial_end
from tfglm.server.offered import OfferedTools
from tfglm.server.toolcalls import CallParser, Part

_BITE = 64


class ThoughtCalls:
    """Fed with the text of the reasoning; gives back the text that is reasoning for certain."""

    def __init__(self, tools: OfferedTools) -> None:
        self._tools = tools
        self._trial: CallParser | None = None
        self._parts: list[Part] = []
        self._held: list[str] = []

    def feed(self, text: str) -> str:
        released: list[str] = []
        while text:
            if self._trial is None:
                text = self._scan(text, released)
                if self._trial is None:
                    break
            text = self._try(self._trial, text, released)
        return "".join(released)

    def close(self) -> str:
        """All that is held, as reasoning: the block is closed or cut off."""
        held = "".join(self._held)
        self._trial, self._parts, self._held = None, [], []
        return held

    def finish(self) -> tuple[str, list[Part], CallParser | None]:
        """At the end of a reply inside the block: the rest of the reasoning, and the calls that end it with the parser
        that read them."""
        trial = self._trial
        if trial is None:
            return self.close(), [], None
        parts = self._parts + trial.finish(ended=True)
        if not trial.whole or not {"ok", "repaired"}.issuperset(trial.results):
            return self.close(), [], None
        self.close()
        return "", parts, trial

    def _scan(self, text: str, released: list[str]) -> str:
        """Release text up to an opening tag and begin a trial there; what is left for the trial."""
        text = self.close() + text
        at = text.find(OPEN)
        if at < 0:
            keep = partial_end(text, OPEN)
            self._held = [text[len(text) - keep :]]
            at = len(text) - keep
        else:
            self._trial = CallParser(self._tools)
        released.append(text[:at])
        return text[at:] if self._trial else ""

    def _try(self, trial: CallParser, text: str, released: list[str]) -> str:
        """Feed the trial; if it turns out to be prose, release that and give back what is to be scanned again. A little
        at a time: what is fed beyond the prose is read twice."""
        fed, rest = text[:_BITE], text[_BITE:]
        self._parts += trial.feed(fed)
        self._held.append(fed)
        if trial.strayed is None:
            return rest
        held = self.close()
        end = max(trial.strayed, len(OPEN))
        released.append(held[:end])
        return held[end:] + rest
