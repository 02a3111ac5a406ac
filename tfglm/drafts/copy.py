"""Copies: what followed the last time the text read as it does now. Costs no forward pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tfglm.drafts.automaton import NONE, ROOT, Place, SuffixAutomaton
from tfglm.drafts.base import NO_DRAFT, Draft

END = 1 << 40
"""The first of the numbers that end a text of a corpus: beyond every token id."""

SHORTEST_MATCH = 3
"""Tokens that must agree before anything is copied."""

LONGEST_COPY = 15
"""With the pending token a window of 16 rows, the widest that kernels read in one tile."""

CATCH_UP = 1024
"""Tokens of a text read at once, such as a kept prompt's, that are indexed a round beside those that are new: a
hundred thousand take a second, for which no other reply should wait."""

TRUSTED_MATCH = {"copy-prompt": 8, "copy-corpus": 16, "copy-reply": 24}
"""A copy with at least so many tokens agreeing before it is believed. A reply repeats itself by accident more often
than it repeats its prompt."""


class CopyCorpus:
    """The latest replies of all requests, at most `tokens` of them. The older half is dropped when it is full."""

    def __init__(self, tokens: int) -> None:
        self._half = max(1, tokens // 2)
        self._old, self._new = SuffixAutomaton(), SuffixAutomaton()
        self._end = END

    @property
    def halves(self) -> tuple[SuffixAutomaton, SuffixAutomaton]:
        return self._old, self._new

    def add(self, reply: Sequence[int]) -> None:
        """Keep a finished reply. It ends with a token that no text has, so that none goes on into the next."""
        if self._new.size + len(reply) >= self._half:
            self._old, self._new = self._new, SuffixAutomaton()
        for token in (*reply[: self._half], self._end):
            self._new.add(token)
        self._end += 1


class CopyIndex:
    """Prompt and reply so far of one stream as an index of continuations, beside a corpus of others if there is one."""

    def __init__(self, corpus: CopyCorpus | None = None) -> None:
        self._automaton = SuffixAutomaton()
        self._prompt_length = 0
        self._corpus = corpus
        self._others = corpus.halves if corpus else ()
        self._places: list[Place] = [(ROOT, 0)] * len(self._others)
        self._reply: list[int] = []
        self._behind: deque[int] = deque()

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """The prompt goes on, with a chunk that the model read."""
        self._prompt_length += len(tokens)
        self._append(tokens, len(tokens))

    def skip_prompt(self, tokens: Sequence[int]) -> None:
        """The prompt goes on, with any number of tokens that took the model no time: indexed bit by bit. Until then
        nothing is copied."""
        self._prompt_length += len(tokens)
        self._append(tokens, 0)

    def add(self, tokens: Sequence[int]) -> None:
        """The reply goes on."""
        self._append(tokens, len(tokens))
        if self._corpus:
            self._reply += tokens

    def close(self) -> None:
        """The reply is over: others may copy it."""
        if self._corpus:
            self._corpus.add(self._reply)

    def propose(self, pending: int, room: int) -> Draft:
        """Add the pending token and tell what followed the longest suffix that occurred before; where it was followed
        by several tokens, the most frequent, then the latest. The stream's own text goes before the corpus.

        A confidence is the token's share of what followed, less for a short match. It is a first guess: the policy
        learns what a match of some length from prompt or reply is worth.
        """
        self.add([pending])
        if self._behind:
            return NO_DRAFT
        index = self._automaton
        state = index.link[index.last]
        match = 0 if state == NONE else index.length[state]
        source = self._source(state, match)
        for other, (place, length) in zip(self._others, self._places, strict=True):
            if length > match:
                index, state, match, source = other, place, length, "copy-corpus"
        return _copied(index, state, match, min(room, LONGEST_COPY), source)

    def propose_after(self, draft: Draft, room: int) -> Draft:
        """What followed the last time the text went on with the whole of a model's draft, after at least the pending
        token: `propose` was called for it."""
        index = self._automaton
        state = index.link[index.last]
        place = (ROOT, 0) if state == NONE or self._behind else (state, index.length[state])
        for token in draft.tokens:
            place = index.advance(place, token)
        state, match = place
        if match <= len(draft.tokens):
            return NO_DRAFT
        most = min(room, LONGEST_COPY) - len(draft.tokens)
        return _copied(index, state, match, most, self._source(state, match))

    def _source(self, state: int, match: int) -> str:
        return "copy-prompt" if match and self._automaton.first_end[state] < self._prompt_length else "copy-reply"

    def _append(self, tokens: Sequence[int], at_once: int) -> None:
        """Index `at_once` tokens, and CATCH_UP more if so many wait."""
        self._behind.extend(tokens)
        for _ in range(min(len(self._behind), at_once + CATCH_UP)):
            token = self._behind.popleft()
            self._automaton.add(token)
            for number, other in enumerate(self._others):
                self._places[number] = other.advance(self._places[number], token)


def _copied(index: SuffixAutomaton, state: int, match: int, most: int, source: str) -> Draft:
    if match < SHORTEST_MATCH:
        return NO_DRAFT
    tokens, confidence = _continuation(index, state, match, most)
    sole = sum(token < END for token, _ in index.followers(state)) == 1
    return Draft(tuple(tokens), tuple(confidence), source, match, sole)


def _continuation(index: SuffixAutomaton, state: int, agreed: int, most: int) -> tuple[list[int], list[float]]:
    tokens: list[int] = []
    confidence: list[float] = []
    while len(tokens) < most:
        after = [(index.seen[s], index.last_end[s], token, s) for token, s in index.followers(state) if token < END]
        if not after:
            # The text ends here. A repetition goes on where a shorter match was followed.
            state = index.link[state]
            agreed = 0 if state == NONE else index.length[state]
            if agreed < SHORTEST_MATCH:
                break
            continue
        seen, _, token, state = max(after)
        tokens.append(token)
        confidence.append(seen / sum(times for times, *_ in after) * agreed / (agreed + 2))
        agreed += 1
    return tokens, confidence


def trusted(draft: Draft) -> bool:
    """Whether a copy needs no second opinion: a long match, and only one way in which the text ever went on."""
    return bool(draft.tokens) and draft.sole and draft.match >= TRUSTED_MATCH[draft.source]
