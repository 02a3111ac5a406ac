"""One request at a time: what is drawn, told and counted, and how a reply ends."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from fake_model import FakeModel, hashed
from harness import EOS, TOKENIZER, alone, ask, in_order, request, running

from tfglm.engine.api import (
    ContextLengthError,
    Delta,
    Failed,
    Progress,
    PromptLogprobs,
    SamplingParams,
    TokenLogprob,
)
from tfglm.engine.noise import derived_seed
from tfglm.engine.sampler import TokenCounts, choose

COLUMNS = TOKENIZER.vocab_size + 12
THINK_END, ASSISTANT = TOKENIZER.encode("</think><|assistant|>")


def scripted(reply: Sequence[int], prompt: Sequence[int]) -> FakeModel:
    """A model whose greedy reply to `prompt` is `reply`; eos tokens are second best everywhere."""

    def logits(tokens: Sequence[int], columns: int) -> np.ndarray:
        row = np.zeros(columns, np.float32)
        row[list(EOS)] = 1
        at = len(tokens) - len(prompt)
        if 0 <= at < len(reply):
            row[reply[at]] = 2
        return row

    return FakeModel(COLUMNS, logits=logits)


def spoken(text: str) -> list[int]:
    """One token a character or added token, so that tests can count."""
    return [token for piece in text.split("|") for token in TOKENIZER.encode(piece)]


def greedy(reply: Sequence[int], max_tokens: int = 20, **fields: object) -> tuple[list[int], str, str, object]:
    wanted = request(max_tokens=max_tokens, temperature=0.0, **fields)
    with running(scripted(reply, wanted.prompt)) as engine:
        receiver = ask(engine, wanted)
        end = receiver.finished
    assert in_order(receiver.events)
    assert end.usage.completion_tokens == len(receiver.ids)
    return receiver.ids, receiver.text(), end.reason, end.stop_reason


def serial(wanted_prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    """The reply, token by token, straight from the sampler and the fake's rows."""
    seed = params.seed if params.seed is not None else derived_seed(wanted_prompt, "")
    tokens, counts = list(wanted_prompt), TokenCounts(wanted_prompt)
    for _ in range(count):
        row = hashed(tokens, COLUMNS)
        token = choose(row, params, seed, len(tokens), vocab_size=TOKENIZER.vocab_size, counts=counts)
        tokens.append(token)
        counts.add(token)
    return tokens[len(wanted_prompt) :]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"seed": 7},
        {},
        {"seed": -3, "top_p": 0.9, "top_k": 20, "temperature": 0.7},
        {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2, "min_p": 0.01},
    ],
)
def test_a_reply_is_the_serial_draw_from_the_models_rows(fields: dict[str, float]) -> None:
    wanted = request(max_tokens=40, ignore_eos=True, **fields)
    assert alone(wanted).ids == serial(list(wanted.prompt), wanted.sampling, 40)


def test_the_same_seed_repeats_and_another_differs() -> None:
    first, again, other = (alone(request(max_tokens=20, ignore_eos=True, seed=s)).ids for s in (1, 1, 2))
    assert first == again != other


def test_without_a_seed_the_prompt_and_the_salt_make_one() -> None:
    plain, again, salted = (alone(request(max_tokens=20, ignore_eos=True), seed_salt=s).ids for s in ("", "", "x"))
    assert plain == again != salted


@pytest.mark.parametrize("eos", EOS)
def test_eos_ends_the_reply_counts_and_prints_nothing(eos: int) -> None:
    reply = [*spoken("a|b"), eos]
    assert greedy([*reply, *spoken("c")]) == (reply, "ab", "stop", None)


def test_the_assistant_tag_ends_the_reply_like_eos() -> None:
    reply = [*spoken("a|b"), ASSISTANT]
    assert greedy([*reply, *spoken("c")]) == (reply, "ab", "stop", None)


def test_ignore_eos_goes_on_and_still_prints_nothing() -> None:
    reply = [*spoken("a"), EOS[0], ASSISTANT, *spoken("b")]
    assert greedy(reply, max_tokens=4, ignore_eos=True) == (reply, "ab", "length", None)


def test_an_eos_that_the_tokenizer_calls_ordinary_prints_nothing() -> None:
    reply, [eos] = spoken("a|b|a"), spoken("b")
    wanted = request(max_tokens=3, temperature=0.0, ignore_eos=True)
    with running(scripted(reply, wanted.prompt), eos=[eos]) as engine:
        receiver = ask(engine, wanted)
        assert receiver.finished
    assert (receiver.ids, receiver.text()) == (reply, "aa")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_a_stop_token_id_ends_the_reply_even_with_ignore_eos(include: bool, text: str) -> None:
    reply, [stop] = spoken("a|b|c"), spoken("b")
    ids, told, reason, cause = greedy(reply, ignore_eos=True, stop_token_ids=(stop,), include_stop_in_output=include)
    assert (ids, told, reason, cause) == (reply[:2], text, "stop", stop)


def test_below_min_tokens_no_eos_and_no_stop_token_is_drawn() -> None:
    [stop] = spoken("b")
    reply = spoken("a|b|b|b")
    ids, _, reason, cause = greedy(reply, min_tokens=3, stop_token_ids=(stop,))
    assert len(ids) == 4 and ids[0] == reply[0] and ids[3] == stop and (reason, cause) == ("stop", stop)
    assert not {stop, *EOS} & set(ids[:3])


def test_below_min_tokens_a_stop_string_is_text() -> None:
    assert greedy(spoken("a|b|a|b|c"), min_tokens=3, stop=("ab",)) == (spoken("a|b|a|b"), "ab", "stop", "ab")


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_the_limit_ends_the_reply(max_tokens: int) -> None:
    reply = spoken("a|b|c|d|e|f")
    assert greedy(reply, max_tokens=max_tokens) == (reply[:max_tokens], "abcdef"[:max_tokens], "length", None)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_over_tokens_ends_at_the_completing_one(include: bool, text: str) -> None:
    reply = spoken("a|b|c|d")
    told = greedy(reply, stop=("x", "bc"), include_stop_in_output=include)
    assert told == (reply[:3], text, "stop", "bc")


def test_a_stop_string_completed_by_the_last_allowed_token_wins_over_the_limit() -> None:
    assert greedy(spoken("a|b"), max_tokens=2, stop=("b",)) == (spoken("a|b"), "a", "stop", "b")


def test_text_held_back_for_a_stop_is_delivered_at_the_end() -> None:
    assert greedy(spoken("a|b"), max_tokens=2, stop=("bc",)) == (spoken("a|b"), "ab", "length", None)


def test_stop_strings_do_not_match_in_the_reasoning() -> None:
    reply = [*spoken("a|b"), THINK_END, *spoken("c|b|d")]
    wanted = request(max_tokens=9, temperature=0.0, stop=("b",), starts_in_reasoning=True)
    with running(scripted(reply, wanted.prompt)) as engine:
        receiver = ask(engine, wanted)
        end = receiver.finished
    assert (receiver.text("reasoning"), receiver.text("answer")) == ("ab", "c")
    assert (end.reason, end.stop_reason) == ("stop", "b")
    assert (end.usage.reasoning_tokens, end.usage.completion_tokens) == (3, 5)
    assert [(d.channel, d.token_ids) for d in receiver.deltas] == [
        (("reasoning" if n < 3 else "answer"), (token,)) for n, token in enumerate(reply[:5])
    ]


def test_raw_completions_show_the_think_tags() -> None:
    reply = [*spoken("a"), THINK_END, *spoken("b")]
    told = greedy(reply, max_tokens=3, split_reasoning=False, starts_in_reasoning=True)
    assert told == (reply, "a</think>b", "length", None)


def test_a_character_cut_by_the_limit_is_flushed() -> None:
    half = [i for i in range(256) if TOKENIZER.token_bytes(i) == "é".encode()[:1]]
    assert greedy([*spoken("a"), *half], max_tokens=2)[1] == "a\ufffd"


def test_events_come_in_order_from_the_engines_thread() -> None:
    with running(prefill_rows=16) as engine:
        receiver = ask(engine, request(prompt=list(range(40)), max_tokens=3, ignore_eos=True, prompt_logprobs=0))
        assert receiver.finished
    assert receiver.kinds() == ["Started", *["Progress"] * 3, "PromptLogprobs", *["Delta"] * 3, "Finished"]
    assert [e for e in receiver.events if isinstance(e, Progress)] == [Progress(n, 40) for n in (16, 32, 40)]
    assert receiver.threads == {"engine"}


def test_only_the_rows_asked_for_have_logits() -> None:
    model = FakeModel(COLUMNS)
    with running(model, prefill_rows=16) as engine:
        assert ask(engine, request(prompt=list(range(40)), max_tokens=3, ignore_eos=True)).finished
    assert model.windows == [[(16, 0)], [(16, 0)], [(8, 1)], [(1, 1)], [(1, 1)]]


def test_usage_and_timings_add_up() -> None:
    receiver = alone(request(prompt=list(range(20)), max_tokens=6, ignore_eos=True))
    usage, timings = receiver.finished.usage, receiver.finished.timings
    assert (usage.prompt_tokens, usage.completion_tokens, usage.reasoning_tokens) == (20, 6, 0)
    assert min(timings.queue_ms, timings.prompt_ms, timings.predicted_ms) >= 0
    assert timings.first_token_ms == pytest.approx(timings.queue_ms + timings.prompt_ms)


def expected_logprob(tokens: Sequence[int], token: int, count: int) -> TokenLogprob:
    row = torch.log_softmax(torch.tensor(hashed(tokens, COLUMNS)[: TOKENIZER.vocab_size]).double(), 0).tolist()
    best = sorted(range(len(row)), key=lambda t: (-row[t], t))[:count]
    return TokenLogprob(token, row[token], tuple((t, row[t]) for t in best))


def same(found: TokenLogprob, expected: TokenLogprob) -> bool:
    pairs = zip(found.top, expected.top, strict=True)
    return (
        found.token_id == expected.token_id
        and math.isclose(found.logprob, expected.logprob, rel_tol=1e-12)
        and all(a == b and math.isclose(p, q, rel_tol=1e-12) for (a, p), (b, q) in pairs)
    )


def test_logprobs_are_of_the_raw_rows_whatever_the_sampling() -> None:
    wanted = request(max_tokens=5, ignore_eos=True, logprobs=3, temperature=0.5, top_k=4, repetition_penalty=1.5)
    receiver = alone(wanted)
    tokens = [*wanted.prompt, *receiver.ids]
    start = len(wanted.prompt)
    assert len(receiver.logprobs) == 5
    for n, entry in enumerate(receiver.logprobs):
        assert same(entry, expected_logprob(tokens[: start + n], tokens[start + n], 3))
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in receiver.deltas)


def test_no_logprobs_unless_asked_for() -> None:
    assert alone(request()).logprobs == []


@pytest.mark.parametrize("length", [1, 5, 64, 150])
@pytest.mark.parametrize("max_tokens", [0, 2])
def test_prompt_logprobs(length: int, max_tokens: int) -> None:
    prompt = [n * 7 % 300 for n in range(length)]
    receiver = alone(request(prompt=prompt, max_tokens=max_tokens, prompt_logprobs=2, ignore_eos=True))
    [told] = [event for event in receiver.events if isinstance(event, PromptLogprobs)]
    assert len(told.entries) == length and told.entries[0] is None
    for n, entry in enumerate(told.entries[1:], start=1):
        assert entry is not None and same(entry, expected_logprob(prompt[:n], prompt[n], 2))
    assert len(receiver.ids) == max_tokens and receiver.finished.reason == "length"


def test_prompt_logprobs_of_a_long_prompt_come_in_small_windows() -> None:
    model = FakeModel(COLUMNS)
    with running(model, prefill_rows=256) as engine:
        assert ask(engine, request(prompt=[1] * 150, max_tokens=0, prompt_logprobs=0)).finished
        assert ask(engine, request(prompt=[1] * 150, max_tokens=1)).finished
    assert model.windows == [[(64, 64)], [(64, 64)], [(22, 22)], [(150, 1)]]


def test_a_request_that_does_not_fit_the_window_names_both_numbers() -> None:
    with running(context=100) as engine:
        assert engine.snapshot().context == 100
        assert ask(engine, request(prompt=[1] * 60, max_tokens=40, ignore_eos=True)).finished
        with pytest.raises(ContextLengthError) as caught:
            engine.submit(request(prompt=[1] * 60, max_tokens=41), print)
    assert caught.value.message.startswith(
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
        "(60 in the messages, 41 in the completion)"
    )


def test_the_window_is_the_cache_if_no_setting_says_less() -> None:
    for context, window in ((0, 512), (1000, 512), (512, 512)):
        with running(FakeModel(COLUMNS, tokens=512), context=context) as engine:
            assert engine.snapshot().context == window
            assert ask(engine, request(prompt=[1] * 500, max_tokens=12, ignore_eos=True)).finished


@pytest.mark.parametrize("prompt", [[], [-1], [TOKENIZER.vocab_size]])
def test_a_prompt_no_tokenizer_makes_is_refused(prompt: list[int]) -> None:
    with running() as engine, pytest.raises(ValueError, match=f"token ids from 0 to {TOKENIZER.vocab_size - 1}"):
        engine.submit(request(prompt=prompt), print)


def test_broken_logits_end_their_request_alone() -> None:
    bad = request("bad", prompt=[1, 2, 3], max_tokens=20, ignore_eos=True)
    good = request("good", prompt=[4, 5], max_tokens=20, ignore_eos=True)

    def logits(tokens: Sequence[int], columns: int) -> np.ndarray:
        row = hashed(tokens, columns)
        if tokens[0] == 1 and len(tokens) == 8:
            row[5] = math.nan
        return row

    with running(FakeModel(COLUMNS, logits=logits)) as engine:
        receivers = [ask(engine, bad), ask(engine, good)]
        failed, finished = receivers[0].last, receivers[1].finished
    assert isinstance(failed, Failed) and failed.code == "E_LOGITS" and "position 8" in failed.message
    assert len(receivers[0].ids) == 5 and receivers[1].ids == alone(good).ids and finished.reason == "length"
    assert all(isinstance(event, Delta) for event in receivers[0].events[2:-1])
