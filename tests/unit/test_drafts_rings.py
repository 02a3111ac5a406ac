"""What outlives a stream of a block drafter's rows: which pages, where, and how many bytes of each rank."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tfglm.cache.pages import PAGE
from tfglm.drafts.block import BlockModel
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_files import GPU_FORMAT, expected_shapes
from tfglm.drafts.block_weights import read_weights
from tfglm.drafts.kind import kept_pages
from tfglm.drafts.ring_pages import PageNames, RingPages
from tfglm.formats.latent import KvFormat
from tfglm.memory.drafter import block_drafter_bytes
from tfglm.models.split import Vocabulary
from tfglm.ops.cuda import CudaOps, Precision
from tfglm.ops.group import Alone
from tfglm.ops.reference import ReferenceOps
from tfglm.settings import Settings


def named(text: list[int], cuts: list[int]) -> list[bytes]:
    names = PageNames()
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        names.add(text[start:stop])
    assert names.length == len(text)
    return names.names


def test_pages_of_alike_beginnings_have_alike_names_however_they_come() -> None:
    dice = random.Random(1)
    text = [dice.randrange(9) for _ in range(4 * PAGE + 7)]
    names = named(text, [])
    assert len(names) == len(set(names)) == 4
    for _ in range(5):
        cuts = sorted(dice.randrange(len(text)) for _ in range(6))
        assert named(text, cuts) == names
    other = [*text[: PAGE + 3], 11, *text[PAGE + 4 :]]
    assert [a == b for a, b in zip(names, named(other, []), strict=True)] == [True, False, False, False]


def test_the_book_finds_what_lies_before_an_end_and_forgets_the_longest_unused() -> None:
    book, names = RingPages(3), [b"a", b"b", b"c", b"d"]
    kept = [one for page in (0, 1, 2) for one in book.keep(names, page, page * PAGE)]
    assert sorted(one.place for one in kept) == [0, 1, 2]
    assert book.keep(names, 1, PAGE) == []
    assert book.find(names[:3], 2, PAGE) == kept[1:]
    assert book.find(names, 4, PAGE) == [], "the page before the end is not kept"
    [last] = book.keep(names, 3, 3 * PAGE)
    assert last.place == kept[0].place, "of the others each was used since"
    assert book.find(names, 9, PAGE) == [*kept[1:], last]
    assert RingPages(0).keep(names, 0, 0) == [] and RingPages(0).find(names, 4, PAGE) == []


def test_a_page_of_which_rows_are_missing_is_the_last_to_be_found_until_it_is_whole() -> None:
    book, names = RingPages(4), [b"a", b"b", b"c"]
    whole = [book.keep(names, page, page * PAGE)[0] for page in (0, 2)]
    [partial] = book.keep(names, 1, PAGE + 9)
    assert book.find(names, 3, PAGE) == [partial, whole[1]]
    assert book.find(names, 3, PAGE - 9) == [whole[0], partial, whole[1]], "what is missing is of no use to anybody"
    assert book.keep(names, 1, PAGE + 20) == []
    [better] = book.keep(names, 1, PAGE)
    assert better.place == partial.place and book.find(names, 3, PAGE) == [whole[0], better, whole[1]]


class Rank(Alone):
    """A place among ranks that nobody asks for anything."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks


def folder(path: Path, kind: str, heads: int, inner: int) -> None:
    qwen = {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": inner, "num_attention_heads": 2 * heads,
        "num_key_value_heads": heads, "head_dim": 32, "num_hidden_layers": 3, "rms_norm_eps": 1e-5,
        "layer_types": ["sliding_attention"] * 3, "sliding_window": 300,
    }  # fmt: skip
    config: dict[str, Any] = {
        "speculators_model_type": kind, "transformer_layer_config": qwen, "draft_vocab_size": 512, "mask_token_id": 5,
        "aux_hidden_state_layer_ids": [1, 3], "markov_rank": 16, "selector_rank": 16, "enable_confidence_head": True,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    shapes = expected_shapes(BlockConfig.from_dict(config), 2)
    save_file({name: torch.zeros(shape).bfloat16() for name, shape in shapes.items()}, path / "model.safetensors")


def held(ops: CudaOps, weight: torch.Tensor) -> torch.Tensor:
    return ops.hold(weight, GPU_FORMAT)


@pytest.mark.parametrize("kind", ["dspark", "dflash2"])
@pytest.mark.parametrize(("heads", "inner"), [(4, 320), (2, 96)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_rank_holds_what_is_planned(
    kind: str, heads: int, inner: int, ranks: int, device: str, tmp_path: Path
) -> None:
    """To the byte. A GPU's formats are packed by torch, so a CPU can hold them too."""
    folder(tmp_path, kind, heads, inner)
    settings = Settings(drafter=kind, drafter_path=str(tmp_path), parallel=2, ranks=ranks, device=device)
    planned = block_drafter_bytes(settings)
    assert len(planned) == ranks
    found = []
    for rank in range(ranks):
        tensors, config = read_weights(tmp_path, BlockConfig.from_file(tmp_path / "config.json"), 4)
        gpu = CudaOps(Precision(KvFormat.FP4, "bf16", "bf16"), torch.device("cpu"))
        hold: Callable[[torch.Tensor], torch.Tensor] | None = None
        if device == "cuda":
            hold = lambda weight, gpu=gpu: held(gpu, weight)  # noqa: E731
        vocabulary = Vocabulary(Rank(rank, ranks), ((0, 512),) * ranks)
        model = BlockModel(config, tensors, torch.zeros(512, 128), ReferenceOps(), torch.bfloat16, vocabulary, hold)
        contexts = [model.open(number) for number in range(settings.parallel)]
        contexts[0].length = 4 * PAGE
        for place in range(kept_pages(config, settings)):
            model.keep(contexts[0], 3, place)
        kept = [rows for context in contexts for rows in (context.keys, context.values)] + list(model._pages.values())
        scales = [dense.scales for dense in gpu._dense.values() if dense.scales is not None]
        storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in [*model.tensors.values(), *kept, *scales]}
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in storages.values() if tensor.numel()))
    assert list(planned) == found
    alone = block_drafter_bytes(dataclasses.replace(settings, ranks=1))
    assert max(planned[1:], default=0) < alone[0]


def test_nothing_is_kept_where_no_prompt_resumes(tmp_path: Path) -> None:
    folder(tmp_path, "dspark", 2, 96)
    config = BlockConfig.from_file(tmp_path / "config.json")
    assert kept_pages(config, Settings(parallel=3)) == 3 * 2, "two pages lie in a window of 300 rows"
    assert kept_pages(config, Settings(parallel=3, kept_gib=0.0)) == 0
