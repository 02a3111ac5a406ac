"""Copies: what followed the last time the text read as it does now. Costs no forward pass."""

from __future__ import annotations

from collections.abc import Iterable

from tfglm.drafts.automaton import NONE, SuffixAutomaton
from tfglm.drafts.base import NO_DRAFT, Draft

SHORTEST_MATCH = 3
"""Tokens that must agree before anything is copied."""

LONGEST_COPY = 15
"""With the pending token a window of 16 rows, the widest that kernels read in one tile."""

TRUSTED_MATCH = {"copy-prompt": 8, "copy-reply": 24}
"""A copy with at least so many tokens agreeing before it needs no second opinion. A reply repeats itself by accident
more often than it repeats its prompt."""


class CopyIndex:
    """Prompt and reply so far of one stream, as an index of continuations."""

    def __init__(self) -> None:
        self._automaton = SuffixAutomaton()
        self._prompt_length = 0

    def read_prompt(self, tokens: Iterable[int]) -> None:
        self.add(tokens)
        self._prompt_length = self._automaton.size

    def add(self, tokens: Iterable[int]) -> None:
        """The reply goes on."""
        for token in tokens:
            self._automaton.add(token)

    def propose(self, pending: int, room: int) -> Draft:
        """Add the pending token and tell what followed the longest suffix that occurred before; where it was followed
        by several tokens, the most frequent, then the latest.

        A confidence is the token's share of what followed, less for a short match. It is a first guess: the policy
        learns what a match of some length from prompt or reply is worth.
        """
        self._automaton.add(pending)
        index = self._automaton
        state = index.link[index.last]
        if state == NONE or index.length[state] < SHORTEST_MATCH:
            return NO_DRAFT
        source = "copy-prompt" if index.first_end[state] < self._prompt_length else "copy-reply"
        match = agreed = index.length[state]
        tokens: list[int] = []
        confidence: list[float] = []
        while len(tokens) < min(room, LONGEST_COPY):
            after = [(index.seen[s], index.last_end[s], token, s) for token, s in index.followers(state)]
            if not after:
                # The text ends here. A repetition goes on where a shorter match was followed.
                state = index.link[state]
                agreed = index.length[state]
                if agreed < SHORTEST_MATCH:
                    break
                continue
            seen, _, token, state = max(after)
            tokens.append(token)
            confidence.append(seen / sum(times for times, *_ in after) * agreed / (agreed + 2))
            agreed += 1
        return Draft(tuple(tokens), tuple(confidence), source, match)


def trusted(draft: Draft) -> bool:
    return bool(draft.tokens) and draft.match >= TRUSTED_MATCH[draft.source]
