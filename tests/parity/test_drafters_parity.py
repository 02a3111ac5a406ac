"""Block drafters against the classes of speculators 0.9.0 (vectors/make_block_drafters.py), and tapped streams against
the hidden states of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reference_models import make_pair, token_ids
from safetensors.torch import save_file

from tfglm.cache.pages import PagePool, Stream
from tfglm.drafts.base import Ask, Kept
from tfglm.drafts.block import BlockContext, BlockModel
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_drafter import BlockDrafter, BlockText
from tfglm.drafts.block_weights import read_weights
from tfglm.drafts.dflash2 import DFlash2Drafter
from tfglm.drafts.dspark import DSparkDrafter
from tfglm.errors import CheckpointError, ConfigError
from tfglm.models.taps import Passed, Taps
from tfglm.models.window import Rows
from tfglm.ops.reference import ReferenceOps

VECTORS = Path(__file__).parents[1] / "vectors" / "block_drafters.npz"
KINDS = ["dspark-vanilla", "dspark-gated", "dspark-rnn", "dflash2"]
TARGET_LAYERS = 8
TOLERANCE = 1e-4

Arrays = Mapping[str, np.ndarray]


def arrays_of(kind: str) -> dict[str, np.ndarray]:
    with np.load(VECTORS) as file:
        return {name.removeprefix(f"{kind}/"): file[name] for name in file.files if name.startswith(f"{kind}/")}


def write_folder(folder: Path, arrays: Arrays) -> None:
    (folder / "config.json").write_text(str(arrays["config"]))
    tensors = {name.removeprefix("tensor:"): array for name, array in arrays.items() if name.startswith("tensor:")}
    save_file({name: torch.from_numpy(array) for name, array in tensors.items()}, folder / "model.safetensors")


def load(folder: Path, arrays: Arrays) -> BlockDrafter:
    tensors, config = read_weights(folder, BlockConfig.from_file(folder / "config.json"), TARGET_LAYERS)
    ops = ReferenceOps()
    model = BlockModel(config, tensors, torch.from_numpy(arrays["embed"]), ops, torch.float32)
    made = DSparkDrafter if config.kind == "dspark" else DFlash2Drafter
    return made(model, torch.from_numpy(arrays["head"]), ops)


def passed(arrays: Arrays, taps: Taps) -> Passed:
    streams = torch.from_numpy(arrays["streams"]).chunk(len(taps.layers), dim=1)
    return Passed(torch.empty(0), None, dict(zip(taps.layers, streams, strict=True)))


def context_at(drafter: BlockDrafter, arrays: Arrays, anchor: int, cuts: list[int]) -> BlockText:
    """A context that has read the rows before `anchor`, cut into reads."""
    context = drafter.open(Stream(PagePool(0)))
    edges = [0, *sorted({cut for cut in cuts if 0 < cut < anchor}), anchor]
    for start, stop in pairwise(edges):
        drafter.read([Kept(context, arrays["ids"][start:stop].tolist(), start)], passed(arrays, drafter.taps))
    return context


def rings(drafter: BlockDrafter, context: BlockText) -> BlockContext:
    return drafter._contexts[context.number]


@pytest.fixture(params=KINDS)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[dict[str, np.ndarray], BlockDrafter]:
    arrays = arrays_of(request.param)
    write_folder(tmp_path, arrays)
    return arrays, load(tmp_path, arrays)


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 14, 30], [20], [12, 24]])
def test_blocks_are_those_of_speculators(case: tuple[dict[str, np.ndarray], BlockDrafter], cuts: list[int]) -> None:
    arrays, drafter = case
    anchors = arrays["anchors"].tolist()
    contexts = [rings(drafter, context_at(drafter, arrays, anchor, cuts)) for anchor in anchors]
    pending = arrays["ids"][anchors].tolist()
    hidden = drafter._model.fill(list(zip(contexts, pending, strict=True)))
    assert np.abs(hidden.numpy() - arrays["hidden"]).max() < TOLERANCE
    logits = hidden @ torch.from_numpy(arrays["head"]).T
    assert np.abs(logits.numpy() - arrays["logits"]).max() < TOLERANCE
    assert np.abs(arrays["logits"]).max() > 2


def test_heads_after_the_true_tokens_are_those_of_speculators(case: tuple[dict[str, np.ndarray], BlockDrafter]) -> None:
    arrays, drafter = case
    ids, every = arrays["ids"], np.arange(len(arrays["embed"]))
    first = drafter.config.block_size - drafter.most
    for number, anchor in enumerate(arrays["anchors"].tolist()):
        score = drafter.scorer(torch.from_numpy(arrays["hidden"][number, first:]))
        for slot in range(drafter.most):
            scores, sure = score(slot, int(ids[anchor + slot]), every, np.zeros(len(every)))
            if drafter.config.kind == "dspark":
                assert np.abs(scores - arrays["bias"][number, slot]).max() < TOLERANCE
                assert sure == pytest.approx(1 / (1 + np.exp(-arrays["confidence"][number, slot])), abs=TOLERANCE)
            else:
                assert sure is None
                assert np.abs(scores - arrays["edges"][number, slot + 1]).max() < TOLERANCE


def test_a_draft_is_the_best_path_through_the_scores(case: tuple[dict[str, np.ndarray], BlockDrafter]) -> None:
    """Greedy, slot after slot, from logits and heads over the whole vocabulary."""
    arrays, drafter = case
    anchors = arrays["anchors"].tolist()
    asks = [
        Ask(context_at(drafter, arrays, anchor, [5]), int(arrays["ids"][anchor]), 99, _greedy, lambda c: True, False)
        for anchor in anchors
    ]
    first = drafter.config.block_size - drafter.most
    for number, (ask, draft) in enumerate(zip(asks, drafter.propose(asks), strict=True)):
        assert len(draft.tokens) == len(draft.confidence) == drafter.most and draft.source == drafter.config.kind
        score, before = drafter.scorer(torch.from_numpy(arrays["hidden"][number, first:])), ask.pending
        for slot, token in enumerate(draft.tokens):
            logits = arrays["logits"][number, first + slot].astype(np.float64)
            best = np.argsort(-logits, kind="stable")[: drafter._candidates]
            scores, _ = score(slot, before, best, logits[best])
            assert token == best[scores.argmax()]
            before = token
    short = drafter.propose([Ask(asks[2].context, asks[2].pending, 2, _greedy, lambda c: True, False)])
    stopped = drafter.propose([Ask(asks[2].context, asks[2].pending, 9, _greedy, lambda c: False, False)])
    whole = drafter.propose([asks[2]])
    assert (short[0].tokens, stopped[0].tokens) == (whole[0].tokens[:2], whole[0].tokens[:1])


def _greedy(ids: np.ndarray, values: np.ndarray, ahead: int) -> tuple[int, float]:
    return int(ids[values.argmax()]), 0.5


def test_bfloat16_files_are_read_as_their_float32_values(tmp_path: Path) -> None:
    arrays = arrays_of("dspark-rnn")
    drafts = []
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        folder.mkdir()
        write_folder(folder, arrays)
        rounded = {
            name.removeprefix("tensor:"): torch.from_numpy(array).bfloat16().to(dtype)
            for name, array in arrays.items()
            if name.startswith("tensor:")
        }
        save_file(rounded, folder / "model.safetensors")
        drafter = load(folder, arrays)
        drafts += drafter.propose([Ask(context_at(drafter, arrays, 13, []), 3, 9, _greedy, lambda c: True, False)])
    assert drafts[0] == drafts[1]


def test_a_stream_that_the_config_leaves_unsaid_is_the_targets_last(tmp_path: Path) -> None:
    arrays = arrays_of("dspark-vanilla")
    config = json.loads(str(arrays["config"]))
    config["aux_hidden_state_layer_ids"] = [2, 6]
    write_folder(tmp_path, {**arrays, "config": np.array(json.dumps(config))})
    assert load(tmp_path, arrays).taps == Taps(layers=(2, 6, TARGET_LAYERS))


def test_the_flat_form_counts_layers_that_a_stream_leaves(tmp_path: Path) -> None:
    raw = json.loads(str(arrays_of("dflash2")["config"]))
    flat = raw["transformer_layer_config"] | {
        "architectures": ["DFlash2DraftModel"],
        "is_causal": False,
        "dflash_config": {
            "block_size": 4, "mask_token_id": 95, "selector_rank": 8, "selector_top_k": 6, "conv_kernel_size": 2,
            "conv_group_size": 8, "target_layer_ids": [1, 2, 5],
        },
    }  # fmt: skip
    ours, theirs = BlockConfig.from_dict(flat), BlockConfig.from_dict(raw)
    assert ours.layers == theirs.layers == (2, 3, 6) and not ours.causal and not ours.from_anchor
    assert ours.window_by_query and not theirs.window_by_query


def test_a_window_by_query_hides_what_each_slot_has_left_behind(tmp_path: Path) -> None:
    """The context of slot k reaches window - 1 tokens back from slot k itself."""
    arrays = arrays_of("dflash2")
    write_folder(tmp_path, arrays)
    drafter = load(tmp_path, arrays)
    model = drafter._model
    window, anchor = drafter.config.window, 31
    config = BlockConfig(**{**vars(drafter.config), "window_by_query": True})
    by_query = BlockModel(config, model.tensors, torch.from_numpy(arrays["embed"]), ReferenceOps(), torch.float32)
    context = rings(drafter, context_at(drafter, arrays, anchor, []))
    ring, hidden = by_query._visible(context)
    assert ring.tolist() == [row % window for row in range(anchor - window, anchor)]
    assert hidden.sum(dim=1).tolist() == [1, 2, 3, 4]
    assert not torch.equal(by_query.fill([(context, 5)]), model.fill([(context, 5)]))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("markov_head_type",), "bilinear", "markov_head_type is 'bilinear'"),
        (("speculators_model_type",), "eagle3", "speculators_model_type is 'eagle3'"),
        (("transformer_layer_config", "layer_types"), ["sliding_attention", "full_attention"], "layer_types"),
        (("transformer_layer_config", "attention_bias"), True, "attention_bias"),
        (("transformer_layer_config", "rope_parameters"), {"rope_type": "yarn", "rope_theta": 1.0}, "rope_type"),
        (("draft_vocab_size",), 32, "draft_vocab_size"),
        (("target_hidden_size",), 64, "target_hidden_size"),
        (("mask_token_id",), None, "mask_token_id"),
        (("mask_token_id",), 96, "mask_token_id"),
        (("aux_hidden_state_layer_ids",), [3, 2], "aux_hidden_state_layer_ids"),
        (("aux_hidden_state_layer_ids",), None, "aux_hidden_state_layer_ids"),
        (("block_size",), 0, "block_size"),
    ],
)
def test_configs_that_need_another_forward_are_refused(path: tuple[str, ...], value: Any, message: str) -> None:
    raw = json.loads(str(arrays_of("dspark-gated")["config"]))
    inner = raw
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(ConfigError, match=message):
        BlockConfig.from_dict(raw)


def test_files_that_do_not_hold_the_drafter_are_refused(tmp_path: Path) -> None:
    arrays = arrays_of("dspark-gated")
    config = BlockConfig.from_dict(json.loads(str(arrays["config"])))
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_weights(tmp_path, config, TARGET_LAYERS)
    write_folder(tmp_path, {name: array for name, array in arrays.items() if name != "tensor:norm.weight"})
    with pytest.raises(CheckpointError, match=r"lacks the tensors norm\.weight"):
        read_weights(tmp_path, config, TARGET_LAYERS)
    write_folder(tmp_path, {**arrays, "tensor:extra": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match="no place for the tensors extra"):
        read_weights(tmp_path, config, TARGET_LAYERS)
    write_folder(tmp_path, {**arrays, "tensor:norm.weight": np.zeros(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"norm\.weight is F32 \[3\]"):
        read_weights(tmp_path, config, TARGET_LAYERS)
    write_folder(tmp_path, arrays)
    with pytest.raises(CheckpointError, match="reads layer 6"):
        read_weights(tmp_path, config, 5)


def test_tapped_streams_are_the_hidden_states_of_transformers() -> None:
    pair = make_pair(0)
    model, tokens = pair.build(), token_ids(4, 30)
    layers = tuple(range(model.config.num_hidden_layers + 1))
    stream = model.open_stream()
    first = model.forward_tapped([Rows(stream, tokens[:20], 0)], Taps(normed=True, layers=layers))
    second = model.forward_tapped([Rows(stream, tokens[20:], 3)], Taps(normed=True, layers=layers))
    stream.close()
    with torch.no_grad():
        theirs = pair.theirs(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    states = theirs.hidden_states  # entering each layer, then after the last norm
    for layer in layers[:-1]:
        ours = torch.cat([first.streams[layer], second.streams[layer]])
        assert (ours - states[layer][0]).abs().max() < TOLERANCE
    assert first.normed is not None and second.normed is not None
    normed = torch.cat([first.normed, second.normed])
    assert (normed - states[-1][0]).abs().max() < TOLERANCE
    last = torch.cat([first.streams[layers[-1]], second.streams[layers[-1]]])
    eps, weight = model.config.rms_norm_eps, model.weights.norm
    assert (torch.nn.functional.rms_norm(last, weight.shape, weight, eps) - normed).abs().max() < TOLERANCE
