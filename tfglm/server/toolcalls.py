"""Tool calls in the text of an answer, read as it comes: text in, text and calls out.

    <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>

White space between tags is allowed. A value is taken as it stands up to the first `</arg_value>`. `<tool_call>` opens
a call only where a name and then a tag follow; elsewhere it is text, so that prose may speak of it. What comes out
depends on the text alone and not on how it is cut into pieces. Slips that models make are mended where one reading is
left; a call that cannot go on is left with unterminated arguments, which no client can run, and the text goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tfglm.server.argtypes import Types, is_plain_text, quoted, typed
from tfglm.server.callhead import HEAD_WINDOW, read_head
from tfglm.server.jsoncalls import calls_in_json
from tfglm.server.markup import ARG_KEY, ARG_VALUE, CLOSE, END_KEY, END_VALUE, OPEN, SPACE, partial_end, starts
from tfglm.server.offered import OfferedTools, Tool

MAX_KEY = 1024
"""Characters from `<arg_key>` to the value; what is longer is no key."""
MAX_HELD = 65536
"""Characters of calls written as JSON, and of a value whose opening tag is missing: they are held until complete."""

Result = Literal["ok", "repaired", "truncated", "malformed"]
"""How the reading of a call ended. The arguments of the last two are unterminated."""


@dataclass(frozen=True)
class Text:
    """Answer text; `start` counts the characters fed before it."""

    text: str
    start: int


@dataclass(frozen=True)
class CallStart:
    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON of a call's arguments."""

    index: int
    text: str


Part = Text | CallStart | CallArguments


class _Call:
    """The call that is being read."""

    def __init__(self, index: int, tool: Tool, repaired: bool) -> None:
        self.index, self.tool, self.repaired = index, tool, repaired
        self.keys: set[str] = set()

    @property
    def complete(self) -> bool:
        """Whether nothing but the closing tag can be missing; of a tool that was not offered nobody knows."""
        return self.tool.offered and self.tool.required <= self.keys


class CallParser:
    """Fed with the text of one answer. Holds back what may become markup, and values that are not plain text.

    only_first: what follows the first complete call is dropped.
    """

    def __init__(self, tools: OfferedTools, *, only_first: bool = False) -> None:
        self.results: list[Result] = []
        """Of the calls so far, in order."""
        self.first_end: int | None = None
        """Characters up to the end of the first complete call."""
        self.strayed: int | None = None
        """Where the first thing begins that is neither white space nor part of a whole call."""
        self._tools, self._only_first = tools, only_first
        self._buffer = ""
        self._offset = 0  # of the buffer in all the text
        self._state: Callable[[], bool] = self._prose
        self._parts: list[Part] = []
        self._quiet = True  # nothing but white space since the beginning or the last call
        self._blank: list[str] = []
        self._blank_start = 0
        self._call: _Call | None = None
        self._started = 0
        self._types: Types | None = None
        self._plain = False
        self._value: list[str] = []

    @property
    def in_text(self) -> bool:
        """Whether text that followed would be text of the answer."""
        return self._call is None and self._state != self._drop

    @property
    def whole(self) -> bool:
        """Whether all the text so far is complete calls and white space."""
        return self._call is None and not self._buffer and self.strayed is None and bool(self.results)

    def feed(self, text: str) -> list[Part]:
        self._buffer += text
        return self._run()

    def finish(self, ended: bool) -> list[Part]:
        """What is left when no text follows. ended: the model ended the reply by itself."""
        parts: list[Part] = []
        while self._state != self._prose and self._state != self._drop:
            if self._state == self._open_value:
                self._leave_value_open()
            elif self._call is not None:
                self._leave_call(self._call, ended)
            else:
                self._head_at_the_end(ended)
            parts += self._run()
        self._say(len(self._buffer))
        return parts + self._run()

    # --- states: each takes from the buffer what it can and says whether another step may follow

    def _prose(self) -> bool:
        at = self._buffer.find(OPEN)
        if at < 0:
            self._say(len(self._buffer) - partial_end(self._buffer, OPEN))
            return False
        self._say(at)
        self._state = self._head
        return True

    def _head(self) -> bool:
        head = read_head(self._buffer[len(OPEN) : len(OPEN) + HEAD_WINDOW], self._tools)
        if head == "more":
            return False
        if head == "text":
            return self._opener_is_text()
        if head == "json":
            self._state = self._json
            return True
        self._cut(len(OPEN) + head.length)
        self._begin(head.tool, head.repaired)
        self._state = self._between
        return True

    def _json(self) -> bool:
        end = self._buffer.find(CLOSE, 0, MAX_HELD)
        if self._buffer.find(OPEN, len(OPEN), end if end >= 0 else MAX_HELD) >= 0:
            return self._opener_is_text()
        if end < 0:
            return len(self._buffer) >= MAX_HELD and self._opener_is_text()
        calls = calls_in_json(self._buffer[len(OPEN) : end], self._tools)
        if not calls:
            return self._opener_is_text()
        self._cut(end + len(CLOSE))
        for tool, arguments in calls[: 1 if self._only_first else None]:
            self._commit(self._begin(tool, repaired=True), arguments)
        return True

    def _between(self) -> bool:
        """In a call, behind its name or one of its values."""
        call = self._open_call()
        self._cut(len(self._buffer) - len(self._buffer.lstrip(SPACE)))
        found = {tag: starts(self._buffer, tag) for tag in (ARG_KEY, CLOSE, OPEN)}
        if found[ARG_KEY]:
            self._state = self._key
            return True
        if found[CLOSE]:
            self._cut(len(CLOSE))
            return self._commit(call)
        if found[OPEN] and call.complete:
            call.repaired = True
            return self._commit(call)
        if None in found.values():
            return False
        at = self._buffer.find("<")
        word = (self._buffer if at < 0 else self._buffer[:at]).rstrip(SPACE)
        if not word or len(word.split()) > 1 or len(word) > MAX_KEY:
            return self._fail(call)
        tag = None if at < 0 else starts(self._buffer[at:], END_KEY)
        if tag:
            call.repaired = True
            self._state = self._key
        return self._fail(call) if tag is False else bool(tag)

    def _key(self) -> bool:
        """A key, whose opening tag may be missing, and whatever opens its value."""
        call = self._open_call()
        begin = len(ARG_KEY) if self._buffer.startswith(ARG_KEY) else 0
        at = self._buffer.find("<", begin)
        if at < 0:
            return len(self._buffer) > MAX_KEY and self._fail(call)
        closed = starts(self._buffer[at:], END_KEY)
        if not closed:
            return closed is False and self._fail(call)
        key = self._buffer[begin:at].strip(SPACE)
        rest = self._buffer[at + len(END_KEY) :].lstrip(SPACE)
        before = len(self._buffer) - len(rest)
        if not key or key in call.keys or before > MAX_KEY:
            return self._fail(call)
        found = {tag: starts(rest, tag) for tag in (ARG_VALUE, ARG_KEY, CLOSE, OPEN, END_KEY)}
        if found[ARG_VALUE]:
            self._cut(before + len(ARG_VALUE))
            return self._open(call, key)
        if None in found.values():
            return False
        return self._fail(call) if any(found.values()) else self._bare_value(call, key, before)

    def _bare_value(self, call: _Call, key: str, before: int) -> bool:
        """A value without `<arg_value>`. It is held: only `</arg_value>` shows that it is one."""
        end = self._buffer.find(END_VALUE, before, before + MAX_HELD)
        seen = self._buffer[before : end if end >= 0 else before + MAX_HELD]
        if any(tag in seen for tag in (ARG_KEY, CLOSE, OPEN)):
            return self._fail(call)
        if end < 0:
            return len(seen) == MAX_HELD and self._fail(call)
        call.repaired = True
        self._cut(before)
        return self._open(call, key)

    def _open_value(self) -> bool:
        call = self._open_call()
        at = self._buffer.find(END_VALUE)
        text = self._cut(len(self._buffer) - partial_end(self._buffer, END_VALUE) if at < 0 else at)
        if self._plain:
            self._argue(call, quoted(text))
        else:
            self._value.append(text)
        if at < 0:
            return False
        self._cut(len(END_VALUE))
        self._argue(call, '"' if self._plain else typed("".join(self._value), self._types))
        self._state = self._between
        return True

    def _drop(self) -> bool:
        self._cut(len(self._buffer))
        return False

    # --- what happens to calls

    def _open_call(self) -> _Call:
        assert self._call is not None
        return self._call

    def _begin(self, tool: Tool, repaired: bool) -> _Call:
        call = self._call = _Call(self._started, tool, repaired)
        self._started += 1
        self._blank = []
        self._parts.append(CallStart(call.index, tool.name))
        return call

    def _open(self, call: _Call, key: str) -> bool:
        self._types, self._value = call.tool.types.get(key), []
        self._plain = is_plain_text(self._types)
        self._argue(call, f'{"," if call.keys else "{"}"{quoted(key)}":{chr(34) if self._plain else ""}')
        call.keys.add(key)
        self._state = self._open_value
        return True

    def _commit(self, call: _Call, arguments: str = "") -> bool:
        """The call is complete. arguments: all of them, if none have been given."""
        self._argue(call, arguments or ("}" if call.keys else "{}"))
        if self.first_end is None:
            self.first_end = self._offset
        return self._leave("repaired" if call.repaired else "ok", self._drop if self._only_first else self._prose)

    def _fail(self, call: _Call, result: Result = "malformed") -> bool:
        """The call ends here unfinished; what is in the buffer is text."""
        if not call.keys:
            self._argue(call, "{")  # many clients take empty arguments for none
        if self.strayed is None:
            self.strayed = self._offset
        return self._leave(result, self._prose)

    def _leave(self, result: Result, state: Callable[[], bool]) -> bool:
        self.results.append(result)
        self._call, self._quiet, self._blank, self._state = None, True, [], state
        return True

    # --- the end

    def _leave_value_open(self) -> None:
        call, rest = self._open_call(), self._cut(len(self._buffer))
        # As a string, whatever it would have become: an open string is never valid JSON.
        self._argue(call, quoted(rest) if self._plain else '"' + quoted("".join(self._value) + rest))
        self._fail(call, "truncated")

    def _leave_call(self, call: _Call, ended: bool) -> None:
        if not ended:
            self._cut(len(self._buffer))
            self._fail(call, "truncated")
        elif self._state == self._between and CLOSE.startswith(self._buffer) and call.complete:
            self._cut(len(self._buffer))
            call.repaired = True
            self._commit(call)
        else:
            self._fail(call)

    def _head_at_the_end(self, ended: bool) -> None:
        name = self._buffer.removeprefix(OPEN).strip(SPACE)
        tool = self._tools.find(name) if ended and self._state == self._head else None
        if tool is None or not tool.offered or tool.required:
            self._opener_is_text()
            return
        self._cut(len(self._buffer))
        self._commit(self._begin(tool, repaired=True))

    # --- text

    def _opener_is_text(self) -> bool:
        self._say(len(OPEN))
        self._state = self._prose
        return True

    def _say(self, count: int) -> None:
        """Pass on text from the buffer; white space by itself only once other text has followed it."""
        start, text = self._offset, self._cut(count)
        if not text:
            return
        if self._quiet:
            if not self._blank:
                self._blank_start = start
            self._blank.append(text)
            if not text.strip(SPACE):
                return
            start, text = self._blank_start, "".join(self._blank)
            self._quiet, self._blank = False, []
        if self.strayed is None:
            self.strayed = start
        self._parts.append(Text(text, start))

    def _argue(self, call: _Call, text: str) -> None:
        last = self._parts[-1] if self._parts else None
        if isinstance(last, CallArguments) and last.index == call.index:
            self._parts[-1] = CallArguments(call.index, last.text + text)
        elif text:
            self._parts.append(CallArguments(call.index, text))

    def _cut(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        self._offset += len(text)
        return text

    def _run(self) -> list[Part]:
        while self._state():
            pass
        parts, self._parts = self._parts, []
        return parts
