"""The quantiser of one linear against float64 algebra and plain loops."""

import math

import numpy as np
import pytest
import torch

from tfglm.formats import exl3
from tfglm.formats.exl3_code import CODEBOOK_SCALE, codebook_table
from tfglm.quantize import scales
from tfglm.quantize.allocate import NMSE
from tfglm.quantize.encoder import Encoder, search_on_cpu, tile_order
from tfglm.quantize.hessian import Feedback, HessianSum, damped, feedback, filled_up
from tfglm.quantize.linear import Inputs, Quantised, expected_error, ldlq, quantise, random_signs

K, N = 256, 128
ENCODER = Encoder(search_on_cpu, 3, "mcg")
SCALE = 0.95


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def correlated_hessian() -> torch.Tensor:
    mix = normal(K, K, seed=1) / K**0.5 + 0.3 * torch.eye(K)
    rows = HessianSum(K)
    for seed in (2, 3):
        rows.add((normal(500, K, seed=seed) @ mix * torch.linspace(0.5, 2, K)).bfloat16())
    h = damped(rows.mean())
    assert h is not None
    return h


def weights() -> torch.Tensor:
    return normal(K, N, seed=4) * torch.linspace(0.2, 2, N) * torch.linspace(1, 3, K)[:, None] / K**0.5


def sides(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    sv = scales.output_scales(w, random_signs("out", w.shape[1]))
    return scales.input_scales(scales.row_energy(w, sv), w.shape[1], random_signs("in", len(w))), sv


def finish(w: torch.Tensor, h: torch.Tensor | None, *, own_su: bool = True) -> tuple[Quantised, Inputs]:
    su, sv = sides(w)
    factor = Feedback(None, float(su.square().sum())) if h is None else feedback(scales.rotated_hessian(h, su))
    inputs = Inputs(su, h, factor)
    return quantise(w, inputs, sv, SCALE, ENCODER, own_su=own_su), inputs


def proxy(w: torch.Tensor, q: Quantised, h: torch.Tensor) -> float:
    """The proxy error of what was stored, in float64 from the format's definition."""
    missed = exl3.reconstruct(q.trellis, q.suh, q.svh, "mcg").double() - w.double()
    exact = h.double()
    return float((missed * (exact @ missed)).sum() / (w.double() * (exact @ w.double())).sum())


def test_hessian_is_the_weighted_mean_of_the_rows() -> None:
    x, weight = normal(40, 16), normal(40, seed=1).abs()
    rows = HessianSum(16)
    rows.add(x[:10], weight[:10])
    rows.add(x[10:], weight[10:])
    outer = np.einsum("r,ri,rj->ij", weight.double() ** 2, x.double(), x.double()) / float((weight**2).sum())
    np.testing.assert_allclose(rows.mean(), outer, rtol=1e-4, atol=1e-6)
    assert rows.rows == 40
    assert damped(HessianSum(16).mean()) is None
    assert damped(torch.full((16, 16), float("nan"))) is None


def test_few_rows_are_filled_up() -> None:
    h = torch.diag(torch.tensor([4.0, 2.0, 0.0, 2.0]))
    assert torch.equal(filled_up(h, 4), h)
    assert torch.equal(filled_up(h, 1).diagonal(), torch.tensor([2.5, 2.0, 1.5, 2.0]))
    assert torch.equal(filled_up(h, 3, torch.ones(4, 4))[0], torch.tensor([3.25, 0.25, 0.25, 0.25]))
    assert torch.equal(filled_up(torch.zeros(4, 4), 0), torch.eye(4))


def test_block_factor() -> None:
    h = correlated_hessian()
    found = feedback(h)
    assert found.lower is not None
    unit = found.lower.double().numpy()
    blocks = unit.reshape(K // 16, 16, K // 16, 16)
    for row in range(K // 16):
        np.testing.assert_allclose(blocks[row, :, row], np.eye(16), atol=1e-5)
        assert not blocks[row, :, row + 1 :].any()
    middle = np.linalg.solve(unit, np.linalg.solve(unit, h.double().numpy()).T)
    inside = np.kron(np.eye(K // 16), np.ones((16, 16)))
    assert np.abs(middle * (1 - inside)).max() < 1e-4 * np.abs(middle).max()
    assert np.trace(middle) == pytest.approx(found.spread, rel=1e-4)


def test_singular_hessian_is_damped_until_it_factors() -> None:
    rank_one = torch.ones(32, 32)
    assert torch.isfinite(feedback(rank_one).lower).all()


def test_a_factor_of_no_numbers_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the library says of it: a GPU's says nothing."""
    factorise, calls = torch.linalg.cholesky_ex, []

    def silent(h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(h)
        factor, failed = factorise(h)
        return (factor * float("nan") if len(calls) == 1 else factor), torch.zeros_like(failed)

    monkeypatch.setattr(torch.linalg, "cholesky_ex", silent)
    found = feedback(torch.eye(32) * 0.5)
    assert len(calls) == 2 and math.isfinite(found.spread)


def test_scales_and_rotations_invert() -> None:
    w = weights()
    su, sv = sides(w)
    rotated = scales.to_rotated(w, su, sv)
    torch.testing.assert_close(scales.from_rotated(rotated, su, sv), w, rtol=1e-4, atol=1e-5)
    spread = scales.rotate_rows(rotated)  # before the input rotation every row has the codebook's size
    torch.testing.assert_close(spread.square().mean(dim=1).sqrt(), torch.full((K,), CODEBOOK_SCALE))
    h = correlated_hessian()
    error = normal(K, N, seed=9)
    before = scales.from_rotated(error, su, torch.ones(N))
    expected = float((before * (h @ before)).sum())
    seen = float((error * (scales.rotated_hessian(h, su) @ error)).sum())
    assert seen == pytest.approx(expected, rel=1e-4)


def test_tiles_are_those_of_the_format() -> None:
    w = normal(32, 48)
    to_stream, from_stream = tile_order(w.device)
    tiles = scales.to_tiles(w, to_stream)
    assert torch.equal(tiles, exl3.to_stream_order(w))
    assert torch.equal(scales.from_tiles(tiles, from_stream), w)


def nearest(tiles: torch.Tensor, bits: float, codebook: str) -> torch.Tensor:
    """A stand-in for the ring search: each weight's nearest of a few codes."""
    few = codebook_table(codebook)[::4096].astype(np.float32)
    return torch.from_numpy(np.abs(tiles.numpy()[..., None] - few).argmin(-1).astype(np.uint16) * np.uint16(4096))


def test_feedback_order_against_plain_loops() -> None:
    k, n = 384, 32
    w = normal(k, n)
    mix = normal(k, k, seed=1) / k**0.5 + torch.eye(k)
    factor = feedback(mix @ mix.T)
    assert factor.lower is not None
    lower = factor.lower.double().numpy()
    table = codebook_table("mcg").astype(np.float64)
    given, codes = w.double().numpy(), np.zeros((k, n))
    for start in range(k - 16, -1, -16):
        rows = slice(start, start + 16)
        target = given[rows] + lower[start + 16 :, rows].T @ (given - codes)[start + 16 :]
        codes[rows] = table[nearest(torch.from_numpy(target), 3, "mcg").numpy()]
    states, found = ldlq(w, factor, Encoder(nearest, 3, "mcg"))
    # A target that lies halfway between two codes may fall either way; all that follow it may differ then.
    assert np.array_equal(found.numpy(), codes) or np.mean(found.numpy() == codes) > 0.98
    assert torch.equal(
        scales.from_tiles(torch.from_numpy(table)[states.int()], tile_order(w.device)[1]), found.double()
    )


@pytest.mark.parametrize("step", [0.25, 2.0, 1e-3])
def test_scale_search_finds_the_least_error(step: float) -> None:
    """The best scale lies near, above or far below where the search starts."""
    tiles = normal(64, 256)

    def decoded(x: torch.Tensor) -> torch.Tensor:  # 16 even steps around zero
        return ((x / step).clamp(-7.999, 7.999).floor() + 0.5) * step

    def error(g: float) -> float:
        return float((decoded(g * tiles) / g - tiles).square().mean())

    best = min(np.geomspace(step / 10, step * 40, 800), key=error)
    found = scales.search_scale(tiles, 4, 4.6 * step, decoded)
    assert error(found) < 1.02 * error(best)


def test_sampled_tiles_hold_the_extremes() -> None:
    tiles = normal(24, 8, 256) * torch.linspace(1, 2, 192).reshape(24, 8, 1)
    sample = scales.sample_tiles(tiles, 64)
    sizes, found = tiles.square().sum(-1).flatten().sort().values, sample.square().sum(-1)
    assert 48 <= len(sample) <= 64
    assert torch.isin(sizes[:8], found).all() and torch.isin(sizes[-8:], found).all()
    assert len(scales.sample_tiles(tiles, 4)) <= 5
    assert torch.equal(scales.sample_tiles(tiles, 192), tiles.flatten(0, 1))


def test_a_linear_is_stored_with_the_error_that_is_reported() -> None:
    w, h = weights(), correlated_hessian()
    q, inputs = finish(w, h)
    assert (q.trellis.dtype, q.suh.dtype, q.svh.dtype) == (torch.int16, torch.float16, torch.float16)
    assert q.trellis.shape == (K // 16, N // 16, 48)
    assert q.proxy_error == pytest.approx(proxy(w, q, h), rel=1e-3)
    _, sv = sides(w)
    assert q.error == pytest.approx(NMSE[3] * expected_error(sv, inputs.feedback.spread), rel=0.15)


def test_feedback_and_refit_pay() -> None:
    w, h = weights(), correlated_hessian()
    with_feedback, _ = finish(w, h)
    su, sv = sides(w)
    without = quantise(w, Inputs(su, h, Feedback(None, K)), sv, SCALE, ENCODER, own_su=True)
    assert with_feedback.proxy_error < 0.8 * without.proxy_error
    shared, inputs = finish(w, h, own_su=False)
    assert torch.equal(shared.suh, inputs.su.half())
    assert with_feedback.proxy_error < shared.proxy_error < 1.05 * with_feedback.proxy_error
    unfitted = scales.from_rotated(
        scales.to_rotated(exl3.reconstruct(shared.trellis, shared.suh, (sv / SCALE).half(), "mcg"), su, sv), su, sv
    )
    missed = unfitted - w
    assert shared.error < float((missed * (h @ missed)).sum())


def test_without_calibration_weights_are_kept_evenly() -> None:
    q, inputs = finish(weights(), None)
    assert q.noise == pytest.approx(NMSE[3], rel=0.1)
    assert q.proxy_error == pytest.approx(proxy(weights(), q, torch.eye(K)), rel=1e-3)
    assert q.error == pytest.approx(NMSE[3] * expected_error(sides(weights())[1], inputs.feedback.spread), rel=0.1)


def test_columns_and_rows_of_zeros() -> None:
    w = weights()
    w[:, 5] = 0
    w[7] = 0
    q, _ = finish(w, correlated_hessian())
    stored = exl3.reconstruct(q.trellis, q.suh, q.svh, "mcg")
    assert not stored[:, 5].any()  # exactly: padded outputs must be zero
    assert float(stored[7].abs().max()) < 1e-6
    assert torch.isfinite(stored).all() and q.proxy_error < 0.03


def test_signs_depend_on_the_name_alone() -> None:
    assert torch.equal(random_signs("a", 512), random_signs("a", 512))
    assert not torch.equal(random_signs("a", 512), random_signs("b", 512))
    assert set(random_signs("a", 512).tolist()) == {-1.0, 1.0}
    assert abs(float(random_signs("a", 4096).mean())) < 0.06
