"""An index of everything a text has said: a suffix automaton that grows by one token at a time.

A state stands for strings that end at the same places of the text; its link for the longest suffix of them that also
ends elsewhere. So after every token the longest suffix that occurred before is one link away. Growing takes O(1)
amortised time and 2n states for n tokens (Blumer et al. 1985).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

NONE = -1
ROOT = 0
Place = tuple[int, int]
"""A state and the length of the one of its strings that a text ends with: the longest suffix of it that occurs."""

COUNTED_LINKS = 16
"""States whose occurrences are counted when a token is added, from the longest suffix down: bounded, so that a text of
one repeated token does not cost its length every time."""


class SuffixAutomaton:
    """Per state: link, length of its longest string, first and latest place where it ends, and how often it occurred.

    Most states have one follower, kept in two arrays; the others' are in a dictionary. 56 bytes a state.
    """

    def __init__(self) -> None:
        self.link, self.length = array("q"), array("q")
        self.first_end, self.last_end, self.seen = array("q"), array("q"), array("q")
        self._token, self._next = array("q"), array("q")
        self._more: dict[int, dict[int, int]] = {}
        self._new(0, NONE)
        self.last = ROOT
        self.size = 0

    def add(self, token: int) -> None:
        """The text goes on with `token` (>= 0)."""
        end, self.size = self.size, self.size + 1
        state, p = self._new(self.size, end), self.last
        while p != NONE and self.follow(p, token) == NONE:
            self._set(p, token, state)
            p = self.link[p]
        if p == NONE:
            self.link[state] = ROOT
        else:
            q = self.follow(p, token)
            self.link[state] = q if self.length[q] == self.length[p] + 1 else self._split(p, token, q)
        self.last = state
        for _ in range(COUNTED_LINKS):
            if state == ROOT:
                break
            self.seen[state] += 1
            self.last_end[state] = end
            state = self.link[state]

    def follow(self, state: int, token: int) -> int:
        """The state after `token`, or NONE if the text never went on so."""
        if self._token[state] == token:
            return self._next[state]
        more = self._more.get(state)
        return NONE if more is None else more.get(token, NONE)

    def followers(self, state: int) -> Iterator[tuple[int, int]]:
        """Every (token, state after it)."""
        if self._token[state] != NONE:
            yield self._token[state], self._next[state]
        yield from self._more.get(state, {}).items()

    def advance(self, place: Place, token: int) -> Place:
        """The place of a text that goes on with `token`, as text that need not be this one's own. The texts may grow
        between two calls."""
        state, length = place
        while state != ROOT and length <= self.length[self.link[state]]:
            state = self.link[state]  # the state was split, and the shorter strings went to its new half
        while state != ROOT and self.follow(state, token) == NONE:
            state = self.link[state]
            length = self.length[state]
        after = self.follow(state, token)
        return (ROOT, 0) if after == NONE else (after, length + 1)

    def _new(self, length: int, end: int) -> int:
        self.link.append(NONE)
        self.length.append(length)
        self.first_end.append(end)
        self.last_end.append(end)
        self.seen.append(0)
        self._token.append(NONE)
        self._next.append(NONE)
        return len(self.link) - 1

    def _set(self, state: int, token: int, target: int) -> None:
        if self._token[state] in (token, NONE):
            self._token[state], self._next[state] = token, target
        else:
            self._more.setdefault(state, {})[token] = target

    def _split(self, p: int, token: int, q: int) -> int:
        """The strings of q no longer than p's by one token end elsewhere too: a state of their own."""
        clone = self._new(self.length[p] + 1, self.first_end[q])
        self.last_end[clone], self.seen[clone] = self.last_end[q], self.seen[q]
        self._token[clone], self._next[clone] = self._token[q], self._next[q]
        if q in self._more:
            self._more[clone] = dict(self._more[q])
        self.link[clone], self.link[q] = self.link[q], clone
        while p != NONE and self.follow(p, token) == q:
            self._set(p, token, clone)
            p = self.link[p]
        return clone
