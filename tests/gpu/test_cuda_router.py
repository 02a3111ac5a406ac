"""The choice of experts on the GPU: the total order, weights of the scores alone, every pair in its group."""

import pytest
import torch

from tfglm.ops import cuda_router, order
from tfglm.ops.base import Routing

pytestmark = pytest.mark.gpu


def route(logits: torch.Tensor, correction: torch.Tensor, picks: int, normalise: bool = True) -> Routing:
    shape = (logits.shape[0], picks)
    experts = torch.full(shape, -1, dtype=torch.int32, device=logits.device)
    weights = torch.full(shape, float("nan"), device=logits.device)
    return cuda_router.route(logits, correction, normalise, 2.5, experts, weights)


@pytest.mark.parametrize(("count", "picks"), [(256, 8), (8, 4), (12, 4), (288, 8), (512, 32)])
@pytest.mark.parametrize("normalise", [True, False])
def test_route_against_float64(count: int, picks: int, normalise: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(11, count, generator=generator)
    correction = torch.randn(count, generator=generator) * 0.1
    got = route(logits.to(device), correction.to(device), picks, normalise)
    scores = torch.sigmoid(logits.double())
    want = (scores + correction.double()).argsort(dim=1, descending=True)[:, :picks]
    assert torch.equal(got.experts.cpu().long(), want)
    weights = scores.gather(1, want)
    if normalise:
        weights = weights / weights.sum(dim=1, keepdim=True)
    assert torch.allclose(got.weights.cpu().double(), weights * 2.5, rtol=1e-5, atol=0)


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-1, 2, (16, 256), generator=generator).float() * 0.5
    correction = torch.zeros(256)
    got = route(logits.to(device), correction.to(device), 8)
    assert torch.equal(got.experts.cpu().long(), order.best(logits, 8))  # sigmoid keeps order and equality


def test_a_row_s_choice_does_not_depend_on_its_window(device: torch.device) -> None:
    logits = torch.randn(16, 256, generator=torch.Generator().manual_seed(2)).to(device)
    correction = torch.randn(256, generator=torch.Generator().manual_seed(3)).to(device)
    whole = route(logits, correction, 8)
    for rows in range(1, 17):
        part = route(logits[16 - rows :].contiguous(), correction, 8)
        assert torch.equal(part.experts, whole.experts[16 - rows :])
        assert torch.equal(part.weights, whole.weights[16 - rows :])


@pytest.mark.parametrize(("rows", "picks", "count"), [(1, 8, 256), (16, 8, 256), (7, 4, 8), (700, 8, 40)])
def test_groups_hold_every_pair_once(rows: int, picks: int, count: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(rows)
    experts = torch.randint(0, count, (rows, picks), generator=generator, dtype=torch.int32)
    limit = min(count, rows * picks)

    def poison(n: int) -> torch.Tensor:
        return torch.full((n,), -7, dtype=torch.int32, device=device)

    groups = cuda_router.Groups(poison(rows * picks), poison(limit + 1), poison(limit))
    cuda_router.group(experts.to(device), count, groups)
    flat = experts.flatten().long()
    present = flat.unique()
    assert torch.equal(groups.pairs.cpu().long(), flat.argsort(stable=True))
    assert torch.equal(groups.experts.cpu()[: len(present)].long(), present)
    starts = groups.starts.cpu()
    assert starts[len(present) :].tolist() == [rows * picks] * (limit + 1 - len(present))
    for i, expert in enumerate(present):
        members = groups.pairs.cpu()[starts[i] : starts[i + 1]].long()
        assert (flat[members] == expert).all()
