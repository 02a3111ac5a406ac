"""Reply text against naive oracles that see the whole reply at once."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.checkpoint.vocabulary import build_tokenizer
from tfglm.engine.text import ReplyText, StopStrings
from tfglm.engine.tokenizer import Tokenizer

TOKENIZER = Tokenizer(build_tokenizer(300))
OPEN, CLOSE, EOS = (TOKENIZER.id_of(name) for name in ("<think>", "</think>", "<|endoftext|>"))
CALL = TOKENIZER.id_of("<tool_call>")
assert OPEN and CLOSE and EOS and CALL

any_id = st.one_of(
    st.integers(0, TOKENIZER.vocab_size - 1),
    st.sampled_from([OPEN, CLOSE, EOS, CALL]),
    st.sampled_from(TOKENIZER.encode("ab ñ 日本 🌍 aab")),
)
stops = st.lists(st.text("ab日 <>", min_size=1, max_size=4), max_size=4)
dense = st.text("ab", max_size=40)
dense_stops = st.lists(st.text("ab", min_size=1, max_size=7), max_size=4)
"""Two letters only, so that partial matches overlap and several stops end at once."""


def whole(ids: list[int], reasoning: bool, split: bool) -> dict[str, str]:
    """Each channel's text without stop strings, decoded in one go."""
    parts: dict[str, list[int]] = {"reasoning": [], "answer": []}
    channel = "reasoning" if reasoning and split else "answer"
    for token in ids:
        if split and token in (OPEN, CLOSE):
            channel = "answer" if token == CLOSE else channel
        elif not TOKENIZER.is_special(token):
            parts[channel].append(token)
    return {name: b"".join(map(TOKENIZER.token_bytes, part)).decode(errors="replace") for name, part in parts.items()}


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string to be completed ends, and which; the longest of those that end there."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return end, stop
    return None


def played(reply: ReplyText, ids: list[int]) -> dict[str, str]:
    texts = {"reasoning": "", "answer": ""}
    for token in ids:
        channel = reply.channel
        texts[channel] += reply.feed(token)
        if reply.stopped_by is not None:
            break
    texts[reply.channel] += reply.finish()
    return texts


@given(st.lists(any_id, max_size=60), st.booleans(), st.booleans())
def test_text_is_the_whole_decoded_at_once(ids: list[int], reasoning: bool, split: bool) -> None:
    reply = ReplyText(TOKENIZER, starts_in_reasoning=reasoning, split_reasoning=split)
    assert played(reply, ids) == whole(ids, reasoning, split)


@given(st.lists(any_id, max_size=60), st.booleans(), st.booleans(), stops, st.booleans())
def test_the_answer_is_cut_at_the_first_stop(
    ids: list[int], reasoning: bool, split: bool, stops: list[str], include: bool
) -> None:
    reply = ReplyText(TOKENIZER, starts_in_reasoning=reasoning, split_reasoning=split, stop=stops, include_stop=include)
    texts, expected = played(reply, ids), whole(ids, reasoning, split)
    found = first_stop(expected["answer"], stops)
    if found is not None:
        end, stop = found
        assert reply.stopped_by == stop
        expected["answer"] = expected["answer"][: end if include else end - len(stop)]
    assert texts == expected


@settings(max_examples=400)
@given(dense, dense_stops, st.booleans(), st.lists(st.integers(0, 40), max_size=10))
def test_stops_do_not_depend_on_how_the_text_is_cut(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    def run(pieces: list[str]) -> tuple[str, str | None]:
        matcher, out = StopStrings(stops, include), ""
        for piece in pieces:
            out += matcher.feed(piece)
            if matcher.found is not None:
                return out, matcher.found
        return out + matcher.release(), None

    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in pairwise(edges)]
    found = first_stop(text, stops)
    expected = (text, None) if found is None else (text[: found[0] if include else found[0] - len(found[1])], found[1])
    assert run(pieces) == run(list(text)) == expected


@given(dense, dense_stops)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher, out = StopStrings(stops, False), ""
    for end, character in enumerate(text, start=1):
        out += matcher.feed(character)
        if matcher.found is not None:
            return
        prefixes = [stop[:n] for stop in stops for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
        assert out == text[: end - max(map(len, prefixes), default=0)]


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_no_piece_ends_inside_a_character(text: str) -> None:
    reply, seen = ReplyText(TOKENIZER), ""
    for byte in text.encode():
        piece = reply.feed(next(i for i in range(256) if TOKENIZER.token_bytes(i) == bytes([byte])))
        assert "\ufffd" not in piece or "\ufffd" in text
        seen += piece
        assert text.startswith(seen)
    assert seen == text


def test_the_think_tag_ends_the_reasoning_and_takes_half_a_character_with_it() -> None:
    reply = ReplyText(TOKENIZER, starts_in_reasoning=True, stop=["b"])
    half = next(i for i in range(256) if TOKENIZER.token_bytes(i) == "é".encode()[:1])
    [a], [b] = TOKENIZER.encode("a"), TOKENIZER.encode("b")
    steps = []
    for token in [b, OPEN, half, CLOSE, CLOSE, a, CALL, OPEN, b]:
        channel = reply.channel
        steps.append((channel, reply.feed(token)))
    assert steps == [
        ("reasoning", "b"),
        ("reasoning", ""),
        ("reasoning", ""),
        ("reasoning", "\ufffd"),
        ("answer", ""),
        ("answer", "a"),
        ("answer", "<tool_call>"),
        ("answer", ""),
        ("answer", ""),
    ]
    assert reply.stopped_by == "b" and reply.finish() == ""


def test_a_stop_before_the_minimum_is_text_and_its_end_may_begin_the_next() -> None:
    reply = ReplyText(TOKENIZER, stop=["aba"])
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    out = [reply.feed(token, may_stop=n >= 4) for n, token in enumerate([a, b, a, b, a])]
    assert out == ["", "", "ab", "", ""] and reply.stopped_by == "aba"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_over_several_tokens(include: bool) -> None:
    reply = ReplyText(TOKENIZER, stop=["<tool_call>ab"], include_stop=include)
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    assert [reply.feed(token) for token in (a, CALL, a)] == ["a", "", ""]
    assert reply.feed(b) == ("<tool_call>ab" if include else "")
    assert reply.stopped_by == "<tool_call>ab"


def test_a_silent_token_prints_nothing() -> None:
    reply = ReplyText(TOKENIZER, silent=TOKENIZER.encode("b"))
    a, b = TOKENIZER.encode("a")[0], TOKENIZER.encode("b")[0]
    assert [reply.feed(a), reply.feed(b), reply.feed(a, silent=True), reply.feed(EOS)] == ["a", "", "", ""]
