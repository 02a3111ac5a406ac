"""The tokenizer against the `tokenizers` and transformers libraries, and against broken files."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tfglm.checkpoint.vocabulary import MARKUP_TOKENS, SPECIAL_TOKENS, build_tokenizer
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import CheckpointError

RAW: tokenizers.Tokenizer = build_tokenizer(600)
OURS = Tokenizer(RAW)
ids = st.lists(st.integers(0, OURS.vocab_size - 1), max_size=30)
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    RAW.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_the_vocabulary_counts_the_added_tokens(folder: Path) -> None:
    loaded = Tokenizer.from_folder(folder)
    assert loaded.vocab_size == 636 == len(RAW.get_vocab(with_added_tokens=True))
    assert [loaded.token_str(i) for i in range(600, 636)] == [*SPECIAL_TOKENS, *MARKUP_TOKENS]
    assert loaded.id_of("</think>") == 600 + len(SPECIAL_TOKENS) + 4
    assert loaded.id_of("no such token") is None
    assert [loaded.is_added(i) for i in (599, 600, 635)] == [False, True, True]
    assert [loaded.is_special(i) for i in (599, 600, 635)] == [False, True, False]


@given(text)
def test_encoding_is_the_librarys_and_loses_nothing(sample: str) -> None:
    encoded = OURS.encode(sample)
    fast = PreTrainedTokenizerFast(tokenizer_object=RAW)
    assert encoded == fast(sample, add_special_tokens=False)["input_ids"]
    assert OURS.decode(encoded) == sample


@given(ids, st.booleans())
def test_decoding_is_the_librarys(sample: list[int], skip_special: bool) -> None:
    assert OURS.decode(sample, skip_special) == RAW.decode(sample, skip_special_tokens=skip_special)


def test_bytes_follow_the_published_byte_map() -> None:
    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    for token, token_id in RAW.get_vocab(with_added_tokens=False).items():
        assert OURS.token_bytes(token_id) == bytes(byte_of[c] for c in token)


def test_markup_in_text_is_recognised_and_nothing_is_added() -> None:
    encoded = OURS.encode("[gMASK]<sop><|user|>hi<think>")
    names = ["[gMASK]", "<sop>", "<|user|>", *[OURS.token_str(i) for i in OURS.encode("hi")], "<think>"]
    assert [OURS.token_str(i) for i in encoded] == names
    assert OURS.encode("") == []


@pytest.mark.parametrize(
    ("written", "read"), [("a\ud83d\ude00b", "a😀b"), ("a\ud800b", "a\ufffdb"), ("\udc00", "\ufffd")]
)
def test_surrogates_are_paired_or_replaced(written: str, read: str) -> None:
    assert OURS.decode(OURS.encode(written)) == read


@pytest.mark.parametrize("token_id", [-1, OURS.vocab_size])
def test_an_id_out_of_range_is_named(token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id} is outside 0 to {OURS.vocab_size - 1}"):
        OURS.decode([token_id])


@settings(max_examples=1)
@given(st.lists(text, min_size=40, max_size=40))
def test_threads_encode_the_same(samples: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(OURS.encode, samples * 5)) == [OURS.encode(sample) for sample in samples] * 5


def test_long_text_lets_other_threads_run() -> None:
    """Else a prompt of megabytes stops every stream and the engine until it is tokenised."""
    ids: list[int] = []
    long = "hello " * 300_000
    reader = Thread(target=lambda: ids.extend(OURS.encode(long)))
    turns = 0
    reader.start()
    while reader.is_alive():
        time.sleep(0.001)
        turns += 1
    assert OURS.decode(ids) == long
    assert turns > 20


def broken(folder: Path, change: str) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    if change == "missing":
        path.unlink()
        return
    if change == "cut":
        path.write_text(path.read_text()[:1000])
        return
    last = max(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    data["model"]["merges"] = []
    if change == "hole":
        data["model"]["vocab"][last] = 700
    if change == "twice":
        data["model"]["vocab"][last] = 0
    if change == "not bytes":
        vocab = data["model"]["vocab"]
        vocab["日"] = vocab.pop(last)
    if change == "word level":
        data["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "tokenizer.json is missing"),
        ("cut", "cannot be read as a tokenizer"),
        ("hole", "without holes"),
        ("twice", "two tokens the same id"),
        ("not bytes", "'日', whose character '日' stands for no byte"),
        ("word level", "WordLevel"),
    ],
)
def test_a_defect_names_the_file(folder: Path, change: str, message: str) -> None:
    broken(folder, change)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as caught:
        Tokenizer.from_folder(folder)
    assert message in caught.value.message
