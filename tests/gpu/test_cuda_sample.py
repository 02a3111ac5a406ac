"""Tokens chosen on the GPU are those that the host's sampler chooses."""

import math

import numpy as np
import pytest
import torch

from tfglm.engine.api import SamplingParams
from tfglm.engine.sampler import LogitsError, choose
from tfglm.ops.cuda_sample import Draws, Scratch, sample

pytestmark = pytest.mark.gpu

WORD = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def noise_key(seed: int, position: int) -> int:
    key = mix(mix((seed + 0x9E3779B97F4A7C15) & WORD) ^ (position * 0xD1B54A32D192ED03 & WORD))
    return key - (1 << 64) if key >> 63 else key


def draws(rows: list[tuple[SamplingParams, int, int]], device: torch.device) -> Draws:
    """Of (parameters, seed, position) a row."""

    def column(values: list[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    params = [p for p, _, _ in rows]
    return Draws(
        column([0.0 if p.top_k == 1 else p.temperature and max(p.temperature, 1e-6) for p in params], torch.float64),
        column([p.top_k for p in params], torch.int32),
        column([p.top_p for p in params], torch.float64),
        column([math.log(p.min_p) if p.min_p > 0 else -math.inf for p in params], torch.float64),
        column([noise_key(seed, position) for _, seed, position in rows], torch.int64),
    )


def chosen(logits: torch.Tensor, vocabulary: int, rows: list[tuple[SamplingParams, int, int]]) -> list[int]:
    device = logits.device
    tokens = torch.full((len(rows),), -99, dtype=torch.int32, device=device)

    scratch = Scratch.allocate(len(rows), vocabulary, device)
    for buffer in vars(scratch).values():
        buffer.fill_(0x5A)
    return sample(logits, vocabulary, draws(rows, device), tokens, scratch).tolist()


PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1.0, top_p=0.95),
    SamplingParams(temperature=0.6, top_k=40),
    SamplingParams(temperature=1.3, top_k=300, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=2.0, top_k=5000, top_p=0.999, min_p=0.001),
    SamplingParams(temperature=0.9, top_p=1e-9),
    SamplingParams(temperature=5.0, top_p=0.5),
]


@pytest.mark.parametrize("vocabulary", [1500, 20_001])
@pytest.mark.parametrize("kind", ["spread", "coarse", "holes"])
def test_the_same_token_as_the_host(vocabulary: int, kind: str, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    repeats = 4 if device.type == "cuda" else 1
    rows = [(p, seed * 7919 + i, 5 + 1000 * seed) for seed in range(repeats) for i, p in enumerate(PARAMS)]
    logits = torch.randn(len(rows), vocabulary + 24, generator=generator) * 3
    if kind == "coarse":  # many equal values at every cut
        logits = (logits * 2).round() / 2
    elif kind == "holes":
        logits[torch.rand(logits.shape, generator=generator) < 0.4] = -math.inf
    logits[:, vocabulary:] = 1e9  # columns past the vocabulary are never chosen
    got = chosen(logits.to(device), vocabulary, rows)
    host = logits.numpy()
    want = [choose(host[i], p, seed, position, vocab_size=vocabulary) for i, (p, seed, position) in enumerate(rows)]
    assert got == want


def test_a_row_s_token_does_not_depend_on_its_window(device: torch.device) -> None:
    logits = (torch.randn(10, 3000, generator=torch.Generator().manual_seed(5)) * 2).to(device)
    rows = [(p, 11, 40 + i) for i, p in enumerate(PARAMS)]
    whole = chosen(logits, 2990, rows)
    for start, stop in ((0, 1), (3, 4), (4, 9), (2, 10)):
        assert chosen(logits[start:stop], 2990, rows[start:stop]) == whole[start:stop]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_rows_without_a_choice_are_reported(bad: float, device: torch.device) -> None:
    logits = torch.zeros(3, 2000)
    logits[0, 1234] = bad
    logits[2] = -math.inf
    rows = [(SamplingParams(temperature=t), 1, 2) for t in (1.0, 0.0, 0.0)]
    got = chosen(logits.to(device), 2000, rows)
    assert got == [-1, 0, -1]
    with pytest.raises(LogitsError):
        choose(np.asarray(logits[0]), rows[0][0], 1, 2, vocab_size=2000)
