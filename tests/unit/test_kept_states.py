"""Kept pages: keys, budget, order of dropping, and the books of pool, streams and kept pages under random use."""

import random

import pytest

from tfglm.cache.kept import KeptStates
from tfglm.cache.pages import PAGE, PagePool, Stream, pages_for


def text(pages: int, mark: int = 0, more: int = 0) -> list[int]:
    """Tokens that differ from page to page and from mark to mark, the last `more` of them in a page of their own."""
    return [mark * 1000 + number for number in range(pages * PAGE + more)]


def read(kept: KeptStates, pool: PagePool, tokens: list[int]) -> Stream:
    """What an engine does with a prompt: resume, read the rest, keep."""
    stream, keys = Stream(pool), kept.keys(tokens)
    kept.lend(stream, kept.find(keys[: (len(tokens) - 1) // PAGE]))
    stream.pages += pool.take(stream.missing_pages(len(tokens)))
    stream.length = len(tokens)
    kept.keep(stream, keys)
    return stream


def close(kept: KeptStates, stream: Stream) -> None:
    kept.part(stream)
    stream.close()


def found(kept: KeptStates, tokens: list[int]) -> int:
    blocks = kept.find(kept.keys(tokens))
    kept.release(blocks)
    return len(blocks)


def test_a_key_is_that_of_all_tokens_up_to_its_page() -> None:
    kept = KeptStates(PagePool(1), 1)
    whole = kept.keys(text(3))
    assert len(set(whole)) == 3 and kept.keys(text(3, more=PAGE - 1)) == whole
    assert kept.keys(text(2)) == whole[:2] and kept.keys(text(0, more=5)) == []
    assert kept.keys(text(3)[PAGE:], whole[0]) == whole[1:]
    changed = text(3)
    changed[0] += 1
    assert not set(kept.keys(changed)) & set(whole)
    assert not set(KeptStates(PagePool(1), 1, b"other").keys(text(3))) & set(whole)


def test_a_prompt_resumes_on_the_longest_kept_beginning_and_shares_its_pages() -> None:
    pool = PagePool(20)
    kept = KeptStates(pool, 10)
    first = read(kept, pool, text(3, more=7))
    second = read(kept, pool, [*text(2), *text(1, mark=9), 5])
    assert second.pages[:2] == first.pages[:2] and not set(second.pages[2:]) & set(first.pages)
    assert kept.pages == 4
    close(kept, first)
    close(kept, second)
    assert pool.free == 20 - 4
    assert (found(kept, text(5)), found(kept, text(2)), found(kept, text(1, mark=9))) == (3, 2, 0)


def test_a_prompt_that_is_kept_whole_leaves_its_last_page_to_be_read() -> None:
    pool = PagePool(9)
    kept = KeptStates(pool, 9)
    close(kept, read(kept, pool, text(2)))
    again = read(kept, pool, text(2))
    assert len(again.lent) == 1 and kept.pages == 2
    close(kept, again)
    assert pool.free == 9 - 2


def test_the_least_recently_used_end_goes_first() -> None:
    pool = PagePool(20)
    kept = KeptStates(pool, 5)
    close(kept, read(kept, pool, text(3, mark=1)))
    close(kept, read(kept, pool, text(2, mark=2)))
    assert found(kept, text(3, mark=1)) == 3  # the second is now the older one
    close(kept, read(kept, pool, text(1, mark=3)))
    assert [found(kept, text(3, mark=mark)) for mark in (1, 2, 3)] == [3, 1, 1]
    close(kept, read(kept, pool, text(3, mark=4)))
    assert kept.pages == 5
    assert [found(kept, text(3, mark=mark)) for mark in (1, 2, 3, 4)] == [0, 1, 1, 3]  # each look was a use


def test_pages_in_use_stay_and_the_budget_holds() -> None:
    pool = PagePool(20)
    kept = KeptStates(pool, 3)
    first = read(kept, pool, text(3, mark=1, more=1))
    second = read(kept, pool, text(3, mark=2, more=1))
    assert kept.pages == 3 and kept.drop(3) == 0
    assert found(kept, text(3, mark=1)) == 3 and found(kept, text(3, mark=2)) == 0
    close(kept, second)
    close(kept, first)
    assert kept.drop(2) == 2 and found(kept, text(3, mark=1)) == 1
    assert pool.free == 20 - 1


def test_two_that_read_the_same_at_once_keep_it_once() -> None:
    pool = PagePool(20)
    kept = KeptStates(pool, 10)
    first, second = Stream(pool), Stream(pool)
    for stream in (first, second):
        stream.pages, stream.length = pool.take(3), 2 * PAGE + 1
    assert [kept.keep(stream, kept.keys(text(2))) for stream in (first, second)] == [2, 0]
    close(kept, first)
    close(kept, second)
    assert (kept.pages, pool.free) == (2, 18)


@pytest.mark.parametrize("seed", range(20))
def test_every_page_has_one_owner(seed: int) -> None:
    """Random prompts out of few beginnings; after each step the pool's, the streams' and the kept pages are all."""
    dice, pool = random.Random(seed), PagePool(24)
    kept = KeptStates(pool, dice.choice([0, 1, 4, 9]))
    streams: list[Stream] = []
    for _ in range(150):
        if streams and (len(streams) == 3 or dice.random() < 0.4):
            close(kept, streams.pop(dice.randrange(len(streams))))
        else:
            pages = dice.randrange(4)
            tokens = [*text(pages, mark=dice.randrange(2)), *text(0, dice.randrange(4), dice.randrange(1, PAGE + 2))]
            if pool.free < pages_for(len(tokens)):
                kept.drop(pages_for(len(tokens)))
            streams.append(read(kept, pool, tokens))
        own = [page for stream in streams for page in stream.pages if page not in stream.lent]
        lent = {page for stream in streams for page in stream.lent}
        assert len(own) == len(set(own)) and not lent & set(own)
        assert len(own) + kept.pages + pool.free == pool.pages and len(lent) <= kept.pages
    for stream in streams:
        close(kept, stream)
    kept.drop(24)
    assert pool.free == pool.pages


@pytest.mark.parametrize("seed", range(20))
def test_many_pages_are_dropped_in_the_order_of_one_at_a_time(seed: int) -> None:
    def made() -> tuple[PagePool, KeptStates]:
        dice = random.Random(seed)
        pool = PagePool(60)
        kept = KeptStates(pool, 40)
        texts = [[dice.randrange(2) for _ in range(PAGE)] * 6 for _ in range(3)]
        for _ in range(14):
            tokens = dice.choice(texts)[: dice.randrange(1, 6) * PAGE] + [dice.randrange(3)] * PAGE
            keys = kept.keys(tokens)
            found = kept.find(keys)
            stream = Stream(pool)
            kept.lend(stream, found)
            stream.pages += pool.take(len(keys) - len(found))
            stream.length = len(tokens)
            kept.keep(stream, keys)
            if dice.random() < 0.8:
                kept.part(stream)
                stream.close()
        return pool, kept

    (pool, kept), (other_pool, other) = made(), made()
    count = 9
    assert kept.drop(count) == sum(other.drop(1) for _ in range(count))
    assert list(kept._blocks) == list(other._blocks) and pool._free == other_pool._free
    assert kept.drop(0) == kept.drop(-3) == 0
