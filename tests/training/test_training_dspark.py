"""The drafter that is trained is the drafter that is served."""

from pathlib import Path

import pytest
import torch

from tfglm.drafts.block import BlockModel
from tfglm.drafts.block_config import BlockConfig
from tfglm.drafts.block_weights import read_weights
from tfglm.drafts.dspark import DSparkDrafter
from tfglm.ops.reference import ReferenceOps
from training.data.pack import PROMPT, REPLY
from training.dspark import Drafter, anchors_of, drafter_config
from training.export import write_safetensors

VOCAB, HIDDEN, LENGTH = 96, 32, 40
ANCHORS = [1, 9, 17, 30]


@pytest.fixture(scope="module")
def drafter() -> Drafter:
    raw = drafter_config(VOCAB, HIDDEN, [1, 2], head_dim=8, sliding_window=12, intermediate_size=48)
    made = Drafter(BlockConfig.from_dict(raw))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(
                (0.2 * torch.randn(parameter.shape, generator=generator) + (parameter.dim() == 1)).bfloat16()
            )
    return made


def test_blocks_equal_those_of_the_engine(drafter: Drafter, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    streams = torch.randn(1, LENGTH, 2 * HIDDEN, generator=generator)
    embed, head = torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB - 1, (LENGTH,), generator=generator)
    anchors = torch.tensor([ANCHORS])
    embedded = embed[VOCAB - 1].expand(1, len(ANCHORS), 8, -1).clone()
    embedded[0, :, 0] = embed[tokens[ANCHORS]]
    with torch.no_grad():
        rows = drafter(streams, embedded, anchors)[0]
    write_safetensors(
        tmp_path / "model.safetensors", {k: v.detach().bfloat16() for k, v in drafter.state_dict().items()}
    )
    tensors, config = read_weights(tmp_path, drafter.config, 3)
    ops = ReferenceOps()
    served = BlockModel(config, tensors, embed, ops, torch.float32)
    scorers = DSparkDrafter(served, head, ops)
    for number, anchor in enumerate(ANCHORS):
        context = served.open(number)
        served.extend([(context, streams[0, :anchor])])
        with torch.inference_mode():
            filled = served.fill([(context, int(tokens[anchor]))])[0]
        assert torch.allclose(filled, rows[number], atol=1e-4)
        ids = torch.arange(VOCAB).numpy()
        values, sure = scorers.scorer(filled)(0, 5, ids, (filled[0] @ head.t()).numpy())
        bias, markov_row = drafter.markov(torch.tensor([5]))
        assert torch.allclose(torch.from_numpy(values).float(), filled[0] @ head.t() + bias[0], atol=1e-3)
        expected = drafter.confidence(filled[:1], markov_row).sigmoid()
        assert sure == pytest.approx(float(expected), abs=1e-4)


def test_anchors_lie_in_replies() -> None:
    weights = torch.full((2, 64), PROMPT, dtype=torch.uint8)
    weights[0, 20:30] = REPLY
    weights[1, 5:50] = REPLY
    anchors, counted = anchors_of(weights, 6, 8, torch.Generator().manual_seed(0))
    for row in range(2):
        for anchor, slots in zip(anchors[row].tolist(), counted[row], strict=True):
            assert weights[row, anchor + 1] == REPLY
            expected = [bool((weights[row, anchor + 1 : anchor + 2 + k] == REPLY).all()) for k in range(8)]
            assert slots.tolist() == expected
