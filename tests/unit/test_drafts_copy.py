"""Copies against a slow search through the whole text."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfglm.drafts.automaton import NONE, ROOT, SuffixAutomaton
from tfglm.drafts.base import NO_DRAFT, Draft
from tfglm.drafts.copy import CATCH_UP, LONGEST_COPY, SHORTEST_MATCH, CopyCorpus, CopyIndex, trusted


def built(text: list[int]) -> SuffixAutomaton:
    index = SuffixAutomaton()
    for token in text:
        index.add(token)
    return index


def copied(prompt: list[int], reply: list[int], room: int) -> Draft:
    """What is proposed after prompt and reply; the last token of both is pending."""
    index = CopyIndex()
    index.read_prompt(prompt if reply else prompt[:-1])
    index.add(reply[:-1])
    return index.propose((prompt + reply)[-1], room)


def ends(text: list[int], piece: list[int]) -> list[int]:
    """Where piece ends in text: indices of its last token."""
    return [i + len(piece) - 1 for i in range(len(text) - len(piece) + 1) if text[i : i + len(piece)] == piece]


def longest_repeat(text: list[int]) -> int:
    """Length of the longest suffix that occurs before, 0 if none does."""
    return max((n for n in range(1, len(text)) if len(ends(text, text[-n:])) > 1), default=0)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=14))
def test_every_state_knows_where_its_strings_end(text: list[int]) -> None:
    index = built(text)
    assert index.length[index.link[index.last]] == longest_repeat(text)
    for start in range(len(text)):
        state = ROOT
        for stop in range(start + 1, len(text) + 1):
            state = index.follow(state, text[stop - 1])
            assert state != NONE
            places = ends(text, text[start:stop])
            assert (index.first_end[state], index.last_end[state]) == (places[0], places[-1])
            assert index.seen[state] == len(places)
            followers = {token for token, _ in index.followers(state)}
            assert followers == {text[p + 1] for p in places if p + 1 < len(text)}
    assert len(index.link) <= max(2 * len(text), 2)


def test_a_copy_goes_on_as_the_text_did_after_the_longest_repeat() -> None:
    chance = random.Random(5)
    proposed = 0
    for _ in range(60):
        text = [chance.randrange(4) for _ in range(chance.randrange(5, 60))]
        draft = copied(text, [], 4)
        length = longest_repeat(text)
        if length < SHORTEST_MATCH:
            assert draft == NO_DRAFT
            continue
        proposed += 1
        assert draft.match == length
        path = text[-length:]
        for token in draft.tokens:
            places = [p for p in ends(text, path) if p + 1 < len(text)]
            while not places:
                path = path[1:]
                places = [p for p in ends(text, path) if p + 1 < len(text)]
            counts = Counter(text[p + 1] for p in places)
            latest = {text[p + 1]: p for p in places}
            assert (counts[token], latest[token]) == max((counts[t], latest[t]) for t in counts)
            path = [*path, token]
    assert proposed > 20


def test_a_copy_is_told_by_where_its_match_first_stood() -> None:
    phrase = list(range(100, 112))
    prompt, reply = [1, *phrase, 2, 3], [4, *phrase[:9]]
    draft = copied(prompt, reply, 8)
    assert (draft.source, draft.match, draft.tokens) == ("copy-prompt", 9, (109, 110, 111, 2, 3, 4, 100, 101))
    assert trusted(draft)
    draft = copied(prompt, [*reply, 50, 51, 52, 53, 54, 7, 50, 51, 52, 53], 2)
    assert (draft.source, draft.match, draft.tokens) == ("copy-reply", 4, (54, 7))
    assert not trusted(draft)


def test_a_long_match_with_two_ways_on_wants_a_second_opinion() -> None:
    phrase = list(range(100, 112))
    once, twice = copied([*phrase, 7], phrase, 4), copied([*phrase, 7, *phrase, 8], phrase, 4)
    assert once.match == twice.match == 12
    assert (once.sole, trusted(once)) == (True, True) and (twice.sole, trusted(twice)) == (False, False)


@pytest.mark.parametrize("seed", range(30))
def test_a_copy_goes_on_after_a_draft_that_the_text_knows(seed: int) -> None:
    """Whichever of the ways on it takes, against a search through the text."""
    dice = random.Random(seed)
    index = CopyIndex()
    text = [dice.randrange(4) for _ in range(60)]
    index.read_prompt(text[:-1])
    index.propose(text[-1], 9)
    drafted = tuple(dice.randrange(4) for _ in range(dice.randrange(1, 5)))
    after = index.propose_after(Draft(drafted, (0.5,) * len(drafted), "dspark"), 9)
    whole = [*text, *drafted]
    match = max((n for n in range(1, len(text)) if any(p < len(text) for p in ends(text, whole[-n:]))), default=0)
    if match <= len(drafted) or match < SHORTEST_MATCH:
        assert after == NO_DRAFT
        return
    assert after.match == match and len(after.tokens) <= 9 - len(drafted)
    following = Counter(text[p + 1] for p in ends(text, whole[-match:]) if p + 1 < len(text))
    if following and after.tokens:
        assert following[after.tokens[0]] == max(following.values())
    assert after.sole == (len(following) == 1)


def test_the_more_frequent_continuation_wins_then_the_latest() -> None:
    draft = copied([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3, 9, 1, 2, 3, 7], [1, 2, 3], 1)
    assert draft.tokens == (9,) and draft.confidence[0] == pytest.approx(0.5 * 3 / 5)
    assert copied([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], [], 1).tokens == (9,)


def test_a_repetition_goes_round_and_a_copy_is_bounded() -> None:
    assert copied([1, 2, 3] * 4, [], 100).tokens == (1, 2, 3) * (LONGEST_COPY // 3)
    assert copied([1, 2, 3] * 4, [], 2).tokens == (1, 2)
    assert copied([1, 2, 3] * 4, [], 0).tokens == ()


def test_a_short_or_missing_match_copies_nothing() -> None:
    for text in ([1], [1, 2, 1, 2], [1, 2, 3, 4]):
        assert copied(text, [], 5) == NO_DRAFT


@pytest.mark.parametrize("kind", ["one token", "words", "all different", "a period"])
def test_an_index_grows_in_linear_time(kind: str) -> None:
    class Counting(SuffixAutomaton):
        steps = 0

        def follow(self, state: int, token: int) -> int:
            self.steps += 1
            return super().follow(state, token)

    chance, length = random.Random(1), 20000
    text = {
        "one token": [7] * length,
        "words": [chance.randrange(300) for _ in range(length)],
        "all different": list(range(length)),
        "a period": [*range(50)] * (length // 50),
    }[kind]
    index = Counting()
    for token in text:
        index.add(token)
    assert index.steps < 10 * length
    assert len(index.link) <= 2 * length


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.lists(st.integers(0, 2), max_size=20), st.randoms())
def test_another_text_finds_its_longest_suffix_while_the_index_grows(
    text: list[int], other: list[int], dice: random.Random
) -> None:
    index, grown, place = SuffixAutomaton(), 0, (ROOT, 0)
    for read, token in enumerate(other, start=1):
        for more in text[grown : grown + dice.randrange(4)]:
            index.add(more)
            grown += 1
        before = place[1]
        place = index.advance(place, token)
        known = text[:grown]
        longest = max((n for n in range(1, read + 1) if ends(known, other[read - n : read])), default=0)
        # What was added since the last token can make a longer suffix known than the one that was followed.
        assert place[1] == max(
            (n for n in range(1, min(before + 1, read) + 1) if ends(known, other[read - n : read])), default=0
        )
        assert place[1] <= longest


def test_replies_of_others_are_copied_from_a_corpus_and_not_beyond_their_ends() -> None:
    corpus = CopyCorpus(1000)
    teacher = CopyIndex(corpus)
    teacher.read_prompt([1, 2])
    teacher.add([10, 11, 12, 13, 14, 15])
    assert copied([3, 10, 11, 12], [], 5) == NO_DRAFT
    pupil = CopyIndex(corpus)
    pupil.read_prompt([3, 10, 11])
    assert pupil.propose(12, 5) == NO_DRAFT, "a reply is copied when it is over"
    teacher.close()
    other = CopyIndex(corpus)
    other.add([70, 71, 72, 73])
    other.close()
    pupil = CopyIndex(corpus)
    pupil.read_prompt([3, 10, 11])
    draft = pupil.propose(12, 9)
    assert (draft.source, draft.match, draft.tokens) == ("copy-corpus", 3, (13, 14, 15))


def test_a_corpus_drops_its_older_half() -> None:
    corpus = CopyCorpus(40)
    for start in range(0, 200, 10):
        index = CopyIndex(corpus)
        index.add(range(start, start + 10))
        index.close()
        assert sum(half.size for half in corpus.halves) <= 44
    late, early = CopyIndex(corpus), CopyIndex(corpus)
    late.add([190, 191])
    early.add([0, 1])
    assert late.propose(192, 3).tokens == (193, 194, 195) and early.propose(2, 3) == NO_DRAFT


def test_a_long_kept_prompt_is_indexed_bit_by_bit_and_then_copied_from_as_if_read() -> None:
    """No call indexes more than a bounded number of tokens, however long the text that a stream begins with."""
    dice = random.Random(4)
    kept, chunk = [dice.randrange(1000) for _ in range(5 * CATCH_UP)], [dice.randrange(1000) for _ in range(50)]
    read, skipped = CopyIndex(), CopyIndex()
    read.read_prompt([*kept, *chunk])
    skipped.skip_prompt(kept)
    skipped.read_prompt(chunk)
    drafts = 0
    for pending in kept[100:120]:
        before = skipped._automaton.size
        draft, expected = skipped.propose(pending, 8), read.propose(pending, 8)
        assert skipped._automaton.size - before <= CATCH_UP + 1
        behind = skipped._automaton.size < read._automaton.size
        assert draft == (NO_DRAFT if behind else expected)
        drafts += draft.source == "copy-prompt"
    assert drafts >= 15
