"""The trained tokenizer: GLM-5.3's form, every byte, the added tokens where the server looks for them."""

import json
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tfglm.checkpoint.vocabulary import MARKUP_TOKENS, SPECIAL_TOKENS, build_tokenizer, tokenizer_config

ROOT = Path(__file__).resolve().parents[2]
BASE = 1476

# Ids of GLM-5.3's added tokens, counted from <|endoftext|>, as published for its tokenizer.
OFFSETS = {
    "<|endoftext|>": 0,
    "[gMASK]": 2,
    "<sop>": 4,
    "<|system|>": 6,
    "<|user|>": 7,
    "<|assistant|>": 8,
    "<|observation|>": 9,
    "<|begin_of_image|>": 10,
    "<|end_of_transcription|>": 17,
    "<|code_prefix|>": 18,
    "<|code_suffix|>": 20,
    "<think>": 21,
    "</think>": 22,
    "<tool_call>": 23,
    "</tool_call>": 24,
    "<tool_response>": 25,
    "</tool_response>": 26,
    "<arg_key>": 27,
    "</arg_key>": 28,
    "<arg_value>": 29,
    "</arg_value>": 30,
    "/nothink": 31,
    "<|begin_of_box|>": 32,
    "<|end_of_box|>": 33,
    "<|image|>": 34,
    "<|video|>": 35,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(BASE)


@pytest.mark.parametrize("base", [BASE, 154820])
def test_added_tokens(base: int) -> None:
    tokenizer = build_tokenizer(base)
    assert tokenizer.get_vocab_size() == base + 36
    assert sorted(tokenizer.get_vocab().values()) == list(range(base + 36))
    for token, offset in OFFSETS.items():
        assert tokenizer.token_to_id(token) == base + offset, token
        assert tokenizer.encode(f"a{token}b").ids.count(base + offset) == 1
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(base, base + 36))
    assert [added[i].special for i in sorted(added)] == [True] * 18 + [False] * 18
    assert not any(token.normalized or token.lstrip or token.rstrip or token.single_word for token in added.values())


def test_markup_survives_decoding_and_special_tokens_do_not(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|user|>hi<think>x</think><tool_call>").ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hi<think>x</think><tool_call>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|user|>hi<think>x</think><tool_call>"


def test_nothing_is_added_around_a_text(tokenizer: Tokenizer) -> None:
    for text in ("hello", "", " ", "[gMASK]<sop>"):
        assert (
            tokenizer.encode(text, add_special_tokens=True).ids == tokenizer.encode(text, add_special_tokens=False).ids
        )
    assert tokenizer.encode("").ids == []


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    """All characters of the Unicode planes in use come back, and so does any mixture of them."""
    characters = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i)) not in ("Cs", "Cn")]
    text = "".join(characters)
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    shuffle = random.Random(0)
    for _ in range(50):
        text = "".join(shuffle.choices(characters, k=40)) + "".join(shuffle.choices(" \n\t\r'aA1.", k=20))
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_pre_tokenizer_rules(tokenizer: Tokenizer) -> None:
    def pieces(text: str) -> list[str]:
        parts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
        return [text[start:end] for _, (start, end) in parts]

    assert pieces("1234567 a") == ["123", "456", "7", " a"]
    assert pieces("I'll can't WE'RE") == ["I", "'ll", " can", "'t", " WE", "'RE"]
    assert pieces("a  b\n\n c!!\n") == ["a", " ", " b", "\n\n", " c", "!!\n"]
    assert pieces("x=(y)") == ["x", "=(", "y", ")"]


def test_the_vocabulary_is_trained_not_filled(tokenizer: Tokenizer) -> None:
    text = "The answer is that the model should return a list of numbers and not an error message."
    assert len(tokenizer.encode(text).ids) < len(text) / 2.5
    assert not any("~1" in token for token in tokenizer.get_vocab())


def test_filled_vocabulary_encodes_the_same(tokenizer: Tokenizer) -> None:
    larger = build_tokenizer(16000)
    text = "def main():\n    return 12345  # häßlich 你好 🚀 ~15000 ~1476"
    assert larger.encode(text).ids == tokenizer.encode(text).ids
    assert larger.decode([15000]) == " ~15000"


def test_file_has_the_published_form(tokenizer: Tokenizer) -> None:
    file = json.loads(tokenizer.to_str())
    assert file["normalizer"] is None
    assert file["model"]["ignore_merges"] is True
    assert file["model"]["type"] == "BPE"
    assert file["model"]["byte_fallback"] is False
    split, byte_level = file["pre_tokenizer"]["pretokenizers"]
    assert (split["type"], split["behavior"], split["invert"]) == ("Split", "Isolated", False)
    assert (byte_level["type"], byte_level["use_regex"], byte_level["add_prefix_space"]) == ("ByteLevel", False, False)
    assert file["post_processor"]["type"] == file["decoder"]["type"] == "ByteLevel"


@pytest.mark.parametrize("seed", ["0", "1"])
def test_training_gives_the_same_file_in_every_process(tokenizer: Tokenizer, seed: str) -> None:
    code = f"from tfglm.checkpoint.vocabulary import build_tokenizer; print(build_tokenizer({BASE}).to_str(), end='')"
    env = {"PYTHONHASHSEED": seed, "PYTHONUTF8": "1", "RAYON_NUM_THREADS": "1" if seed == "0" else "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60
    )
    assert done.stdout == tokenizer.to_str()


def test_tokenizer_config() -> None:
    config = tokenizer_config(8192)
    assert config["model_max_length"] == 8192
    assert config["extra_special_tokens"] == list(SPECIAL_TOKENS)
    assert not set(SPECIAL_TOKENS) & set(MARKUP_TOKENS)
