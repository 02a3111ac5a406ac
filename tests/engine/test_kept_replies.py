"""A resumed prompt gives the reply of a fresh one: at page edges, beside others, drafted, under pressure."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from harness import LIMIT, TOKENIZER, Proposing, Receiver, ask, request
from paged_model import KeepingEngine

from tfglm.cache.kept import Block
from tfglm.cache.pages import PAGE
from tfglm.drafts.costs import Costs
from tfglm.drafts.policy import Policy
from tfglm.drafts.speculator import Speculator
from tfglm.engine.api import Failed, GenerationRequest, SamplingParams
from tfglm.engine.drafting import Drafting
from tfglm.engine.reply import Reply


def prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(300) for _ in range(length)]


def fresh(wanted: GenerationRequest) -> Receiver:
    """The reply of an engine that has read nothing before and keeps nothing."""
    with KeepingEngine(16, 0) as alone:
        receiver = ask(alone.engine, wanted)
        assert receiver.finished.usage.cached_tokens == 0
    return receiver


def same(one: Receiver, other: Receiver) -> bool:
    def outcome(receiver: Receiver) -> tuple[object, ...]:
        *rest, usage = receiver.outcome()
        return *rest, replace(usage, cached_tokens=0)

    return outcome(one) == outcome(other)


@pytest.mark.parametrize(
    ("length", "cached"),
    [
        (1, 0),
        (PAGE - 1, 0),
        (PAGE, 0),
        (PAGE + 1, PAGE),
        (2 * PAGE, PAGE),
        (2 * PAGE + 1, 2 * PAGE),
        (3 * PAGE - 1, 2 * PAGE),
    ],
)
@pytest.mark.parametrize("chunk", [100, PAGE])
def test_the_same_prompt_again_at_page_edges(length: int, cached: int, chunk: int) -> None:
    wanted = request("a", prompt(length), 6, seed=3, logprobs=2)
    with KeepingEngine(16, 8, prefill_rows=chunk) as keeping:
        first = ask(keeping.engine, wanted)
        assert first.finished.usage.cached_tokens == 0
        rows = keeping.rows
        again = ask(keeping.engine, wanted)
        assert again.finished.usage.cached_tokens == cached
        assert keeping.rows - rows == length - cached + 5
    assert same(again, first) and same(again, fresh(wanted))


def test_the_next_turn_resumes_on_the_reply_too() -> None:
    first = request("a", prompt(PAGE), PAGE + 10, temperature=0.0, ignore_eos=True)
    with KeepingEngine(16, 8) as keeping:
        said = ask(keeping.engine, first)
        assert said.finished
        turn = request("b", [*first.prompt, *said.ids, *prompt(20, seed=1)], 5, seed=1)
        next_turn = ask(keeping.engine, turn)
        assert next_turn.finished.usage.cached_tokens == 2 * PAGE
    assert same(next_turn, fresh(turn))


@pytest.mark.parametrize("chunk", [16, 100, PAGE + 7])
def test_where_decoded_rows_differ_the_next_turn_resumes_on_what_was_read(chunk: int) -> None:
    """However the prompts are cut: a page that holds a row of a reply is read anew."""
    first = request("a", prompt(2 * PAGE - 3), PAGE + 10, temperature=0.0, ignore_eos=True)
    with KeepingEngine(16, 8, alike=False, prefill_rows=chunk) as keeping:
        said = ask(keeping.engine, first)
        assert said.finished
        turn = request("b", [*first.prompt, *said.ids, *prompt(20, seed=1)], 5, seed=1)
        later = request("c", [*turn.prompt, *prompt(9, seed=2)], 5, seed=2)
        turns = []
        for wanted, cached in ((turn, PAGE), (later, 3 * PAGE)):
            turns.append(ask(keeping.engine, wanted))
            assert turns[-1].finished.usage.cached_tokens == cached
    with KeepingEngine(16, 0, alike=False) as alone:
        assert all(same(one, ask(alone.engine, wanted)) for one, wanted in zip(turns, (turn, later), strict=True))


def test_a_shared_system_prompt_is_read_once_by_those_that_run_together() -> None:
    system = prompt(2 * PAGE)
    wanted = [request(f"r{n}", [*system, *prompt(30, seed=n)], 40, seed=n) for n in range(1, 5)]
    with KeepingEngine(30, 8, parallel=2) as keeping:
        receivers = [ask(keeping.engine, one) for one in wanted]
        cached = [receiver.finished.usage.cached_tokens for receiver in receivers]
    assert cached[2:] == [2 * PAGE] * 2
    assert all(same(receiver, fresh(one)) for receiver, one in zip(receivers, wanted, strict=True))


@pytest.mark.parametrize(("pages", "together"), [(8, True), (7, False)])
def test_kept_pages_of_a_running_reply_are_promised_once(pages: int, together: bool) -> None:
    """A reply of 4 pages comes when another of 4 has read its prompt: both fit 8 pages at once, and 7 only in turn."""
    first, second = (
        request(name, prompt(3 * PAGE, seed), 100, temperature=0.0, ignore_eos=True)
        for seed, name in enumerate(("a", "b"))
    )
    later = Receiver()
    with KeepingEngine(pages, pages, parallel=2, prefill_rows=PAGE) as keeping:

        def before(window: object) -> None:
            if len(keeping.model.windows) == 4:
                keeping.engine.submit(second, later)

        keeping.model.before = before
        earlier = ask(keeping.engine, first)
        assert earlier.finished and later.finished
        assert any(len(window) == 2 for window in keeping.model.windows) is together
    assert same(earlier, fresh(first)) and same(later, fresh(second))


def test_a_request_that_waits_comes_to_run() -> None:
    """It holds its beginning among the kept pages, while there is no room for the rest."""
    first = request("a", prompt(PAGE + 9), 4)
    long = request("b", prompt(3 * PAGE, seed=1), 3 * PAGE, temperature=0.0, ignore_eos=True)
    with KeepingEngine(8, 8, parallel=2) as keeping:
        assert ask(keeping.engine, first).finished
        running = ask(keeping.engine, long)
        waiting = ask(
            keeping.engine, request("c", [*prompt(PAGE + 9), *prompt(PAGE, seed=3)], 2 * PAGE, temperature=0.0)
        )
        assert waiting.finished and running.finished


def test_a_prompt_whose_probabilities_are_asked_for_is_read_whole() -> None:
    wanted = request("a", prompt(PAGE + 9), 2, prompt_logprobs=1)
    with KeepingEngine(16, 8) as keeping:
        ask(keeping.engine, wanted).last  # noqa: B018
        again = ask(keeping.engine, replace(wanted, id="b"))
        assert again.finished.usage.cached_tokens == 0
    assert same(again, fresh(wanted))


def test_a_cancelled_prompt_is_kept_as_far_as_it_was_read() -> None:
    wanted = request("a", prompt(6 * PAGE), 4, seed=2)
    with KeepingEngine(16, 10, prefill_rows=PAGE) as keeping:
        asked = Receiver()
        windows: list[int] = []

        def before(window: object) -> None:
            windows.append(1)
            if len(windows) == 4:
                keeping.engine.cancel("a")

        keeping.model.before = before
        keeping.engine.submit(wanted, asked)
        assert asked.finished.reason == "cancelled"
        again = ask(keeping.engine, replace(wanted, id="b"))
        assert again.finished.usage.cached_tokens in (3 * PAGE, 4 * PAGE)
    assert same(again, fresh(wanted))


def test_drafts_change_nothing_about_a_resumed_reply() -> None:
    wanted = request("a", [*prompt(60), *prompt(60), *prompt(2 * PAGE + 5)], 30, temperature=0.0, ignore_eos=True)
    plain = fresh(wanted)

    def half_right(reply: Reply, limit: int) -> list[int]:
        drafts = plain.ids[len(reply.tokens) :][: min(limit, 4)]
        return [*drafts[:2], *(token ^ 1 for token in drafts[2:])]

    with KeepingEngine(16, 8, drafting=Proposing(half_right)) as keeping:
        replies = []
        for cached in (0, 2 * PAGE):
            replies.append(ask(keeping.engine, wanted))
            assert replies[-1].finished.usage.cached_tokens == cached
            assert replies[-1].finished.usage.accepted_tokens > 0
    assert all(same(reply, plain) for reply in replies)


def test_copies_come_from_the_part_that_was_not_read_again() -> None:
    """The reply repeats a passage of the kept pages: its copies are found although only the last tokens were read."""
    passage = prompt(40, seed=5)
    text = [*prompt(20), *passage, *prompt(2 * PAGE, seed=6), passage[0], passage[1]]
    wanted = request("a", text, 30, ignore_eos=True, logit_bias={}, temperature=0.0)
    free = Costs((1.0,) * 16)
    accepted = []
    for budget in (0, 8):
        speculator = Speculator(None, Policy(free), copy=True, vocab_size=TOKENIZER.vocab_size)
        with KeepingEngine(16, budget, drafting=Drafting(speculator)) as keeping:
            keeping.model._logits = lambda tokens, size: follow(passage, tokens, size)
            ask(keeping.engine, replace(wanted, id="first")).last  # noqa: B018
            again = ask(keeping.engine, wanted)
            assert again.finished.usage.cached_tokens == (2 * PAGE if budget else 0)
            accepted.append(again.finished.usage.accepted_tokens)
    assert accepted[0] == accepted[1] > 10


def follow(passage: list[int], tokens: list[int], size: int):  # type: ignore[no-untyped-def]
    """Logits of a model that goes on with the passage after its latest token."""
    import numpy as np

    row = np.zeros(size, np.float32)
    last = tokens[-1]
    at = passage.index(last) + 1 if last in passage else 0
    row[passage[at % len(passage)]] = 9
    return row


@pytest.mark.parametrize("seed", range(6))
def test_random_chats_under_pressure_are_the_fresh_ones(seed: int) -> None:
    """Few pages, small budgets, long and short prompts of common beginnings, cancelled ones among them."""
    dice = random.Random(seed)
    wanted = []
    for number in range(14):
        beginning = prompt(dice.choice([0, 90, PAGE, 2 * PAGE + 17]), seed=dice.randrange(2))
        tokens = [*beginning, *prompt(dice.randrange(1, 300), seed=dice.randrange(3))]
        sampling = {"seed": number, "temperature": dice.choice([0.0, 1.0])}
        wanted.append(request(f"r{number}", tokens, dice.randrange(1, 60), logprobs=0, **sampling))
    with KeepingEngine(10, dice.choice([1, 3, 10]), parallel=3, prefill_rows=dice.choice([64, 200])) as keeping:
        receivers = [ask(keeping.engine, one) for one in wanted]
        for number in (3, 8):
            keeping.engine.cancel(f"r{number}")
        ends = [receiver.finished for receiver in receivers]
    whole = [n for n, end in enumerate(ends) if end.reason != "cancelled"]
    assert len(whole) >= 12
    for number in whole:
        assert same(receivers[number], fresh(wanted[number])), number


def test_figures_of_the_engine() -> None:
    with KeepingEngine(16, 8) as keeping:
        ask(keeping.engine, request("a", prompt(2 * PAGE), 1)).last  # noqa: B018
        assert keeping.engine.wait_idle(30)
        now = keeping.engine.snapshot()
        assert (now.kept_tokens, now.kv_tokens_used) == (2 * PAGE, 0)


def test_seeds_that_are_derived_do_not_depend_on_what_was_read() -> None:
    wanted = request("a", prompt(PAGE + 3), 12)
    assert wanted.sampling == SamplingParams()
    with KeepingEngine(16, 8) as keeping:
        first = ask(keeping.engine, wanted)
        assert first.finished.usage.cached_tokens == 0
        again = ask(keeping.engine, wanted)
        assert again.finished.usage.cached_tokens == PAGE
    assert again.ids == first.ids


def test_a_prompt_whose_logits_are_no_numbers_leaves_nothing_to_others() -> None:
    wanted = request("a", prompt(2 * PAGE + 1), 4)
    with KeepingEngine(16, 8, prefill_rows=3 * PAGE) as keeping:
        sound = keeping.model._logits
        keeping.model._logits = lambda tokens, columns: np.full(columns, np.nan, np.float32)
        failed = ask(keeping.engine, wanted).last
        assert isinstance(failed, Failed) and failed.code == "E_LOGITS"
        keeping.model._logits = sound
        again = ask(keeping.engine, wanted)
        assert again.finished.usage.cached_tokens == 0
    assert same(again, fresh(wanted))


def test_the_keys_of_a_prompt_are_made_once() -> None:
    """Also of one whose every row is read, 64 at a time: half a million tokens would be hashed thousands of times."""
    hashed: list[int] = []
    wanted = request("a", prompt(2 * PAGE), 4, prompt_logprobs=0)
    with KeepingEngine(16, 8) as keeping:
        keys = keeping.kept.keys

        def counted(tokens: Sequence[int], before: bytes | None = None) -> list[bytes]:
            hashed.append(len(tokens))
            return keys(tokens, before)

        keeping.kept.keys = counted  # type: ignore[method-assign]
        assert ask(keeping.engine, wanted).finished
    assert sum(hashed) < 3 * PAGE


def test_a_long_prompt_is_hashed_while_nobody_waits() -> None:
    """Half a million tokens take ten milliseconds, for which the engine's lock is not held."""
    hashing, go_on = threading.Event(), threading.Event()
    with KeepingEngine(16, 8) as keeping:
        keys = keeping.kept.keys

        def slow(tokens: Sequence[int], before: bytes | None = None) -> list[bytes]:
            if len(tokens) > 2 * PAGE:
                hashing.set()
                assert go_on.wait(LIMIT)
            return keys(tokens, before)

        keeping.kept.keys = slow  # type: ignore[method-assign]
        receiver, other = Receiver(), Receiver()
        long = request("long", prompt(3 * PAGE), 4)
        threading.Thread(target=keeping.engine.submit, args=(long, receiver), daemon=True).start()
        assert hashing.wait(LIMIT)
        short = threading.Thread(target=keeping.engine.submit, args=(request("short"), other), daemon=True)
        short.start()
        ended = other.ended.wait(LIMIT / 2)
        go_on.set()
        assert ended and other.finished and receiver.finished


def test_the_kept_pages_of_a_request_that_waits_are_walked_once() -> None:
    looked_up: list[int] = []
    begun = prompt(3 * PAGE)
    with KeepingEngine(16, 16, parallel=2) as keeping:
        assert ask(keeping.engine, request("a", begun, 1)).finished
        find = keeping.kept.find

        def counted(keys: Sequence[bytes]) -> list[Block]:
            looked_up.append(len(keys))
            return find(keys)

        keeping.kept.find = counted  # type: ignore[method-assign]
        running = ask(keeping.engine, request("b", prompt(300, seed=1), 6 * PAGE, temperature=0.0, ignore_eos=True))
        waiting = ask(keeping.engine, request("c", [*begun, 7], 12 * PAGE, temperature=0.0))
        assert running.finished and waiting.finished.usage.cached_tokens == 3 * PAGE
    assert len(looked_up) > 100 and sum(looked_up) == 1 + 3
