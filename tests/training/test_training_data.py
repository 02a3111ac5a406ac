"""Training text is what the server would write, the same from the same seed, and never what a test set asks."""

from importlib.resources import files
from random import Random

import numpy as np
import pytest
from tokenizers import Tokenizer

from tfglm.checks.suite import suite
from tfglm.server.template import ChatTemplate
from tfglm.server.thinking import close_thinking
from training.data.conversation import Conversation, render
from training.data.mixture import LONG, SHORT, Mixture, conversation
from training.data.pack import PROMPT, REPLY, Marker, rows
from training.data.vocabulary import trained_tokenizer

TEMPLATE = ChatTemplate(files("tfglm.checkpoint").joinpath("data/chat_template.jinja").read_text(encoding="utf-8"))
CONVERSATIONS = [conversation(Random(f"test {n}"), SHORT) for n in range(150)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return trained_tokenizer(1920, conversations=400)


@pytest.mark.parametrize("made", CONVERSATIONS[:120], ids=range(120))
def test_text_is_the_templates(made: Conversation) -> None:
    text = TEMPLATE.render(
        made.messages(), tools=list(made.tools), add_generation_prompt=False,
        variables={"reasoning_effort": made.effort or "max"},
    )  # fmt: skip
    if made.effort is None:
        text = close_thinking(text + "<|assistant|><think>").removesuffix("<|assistant|><think></think>")
    ending = "<|observation|>" if made.turns[-1].calls else "<|user|>"
    assert render(made) == text + ending


def test_a_reply_is_what_comes_after_the_prompt_of_the_server(tokenizer: Tokenizer) -> None:
    """The tokens with full weight in the last turn are exactly those that a server's prompt leaves to be written."""
    marker = Marker(tokenizer)
    for made in CONVERSATIONS:
        if made.effort and not made.turns[-1].reasoning:
            continue
        ids = np.array(tokenizer.encode(render(made)).ids, np.uint16)
        weights = marker.weights(ids)
        prompt = TEMPLATE.render(
            made.messages()[:-1], tools=list(made.tools), variables={"reasoning_effort": made.effort or "max"}
        )
        prompt = prompt if made.effort else close_thinking(prompt)
        start = len(tokenizer.encode(prompt).ids)
        assert (weights[start:] == REPLY).all() and weights[start - 1] != REPLY
        assert ids[-1] in marker.roles


def test_thinking_that_was_left_out_is_read_and_not_learnt(tokenizer: Tokenizer) -> None:
    text = "[gMASK]<sop><|system|>Reasoning Effort: Max<|user|>1<|assistant|><think></think>2"
    text += "<|user|>3<|assistant|><think>4</think>5<|user|>"
    ids = np.array(tokenizer.encode(text).ids, np.uint16)
    weights = Marker(tokenizer).weights(ids)
    first = tokenizer.token_to_id("2")
    assert weights[list(ids).index(first)] == PROMPT
    assert [tokenizer.id_to_token(i) for i in ids[weights == REPLY]] == ["4", "</think>", "5", "<|user|>"]


def test_rows_hold_whole_conversations(tokenizer: Tokenizer) -> None:
    tokens, weights = rows(tokenizer, "a", SHORT, 12)
    again, _ = rows(tokenizer, "a", SHORT, 12)
    other, _ = rows(tokenizer, "b", SHORT, 12)
    assert np.array_equal(tokens, again) and not np.array_equal(tokens, other)
    start = tokenizer.token_to_id("[gMASK]")
    ends = {tokenizer.token_to_id("<|user|>"), tokenizer.token_to_id("<|observation|>")}
    for row, weight in zip(tokens, weights, strict=True):
        begins = np.flatnonzero(row == start)
        assert begins[0] == 0 and (weight[begins] == 0).all()
        for begin in begins[1:]:
            assert row[begin - 1] in ends
    assert (weights == 0).mean() < 0.2


def test_long_rows_have_keys_far_back(tokenizer: Tokenizer) -> None:
    made = [conversation(Random(f"long {n}"), Mixture("long", 16384, LONG.characters, 1.0)) for n in range(20)]
    lengths = [len(tokenizer.encode(render(one)).ids) for one in made]
    assert max(lengths) > 6000 and max(lengths) < 16384


def test_digits_are_tokens_of_their_own(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("2026 + 7").tokens == ["2", "0", "2", "6", "Ġ+", "Ġ", "7"]


def test_nothing_of_the_test_set_is_asked() -> None:
    """What has a key is split; the rest are facts of closed lists (tfglm/checks/suite.py)."""
    held = {
        str(problem.messages[-1]["content"])
        for problem in suite(("arithmetic", "ledger", "json", "python", "questions"), (0, 1), 60, seed=1)
        if problem.key
    }
    rng = Random("held out")
    asked = {turn.content for _ in range(1500) for turn in conversation(rng, SHORT).turns if turn.role == "user"}
    assert len(held) > 400 and len(asked) > 1500 and not held & asked
