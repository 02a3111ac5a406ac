from pathlib import Path

import pytest

from tfglm.errors import MemoryShortError
from tfglm.memory.plan import GIB, RESERVE_BYTES, available_bytes, plan_cache

FACTS = {"weights": 2 * GIB, "bytes_per_token": 1024, "page": 256, "longest": 65536, "parallel": 4}


def test_the_asked_window_in_whole_pages() -> None:
    plan = plan_cache(available=16 * GIB, context=1000, **FACTS)
    assert (plan.context, plan.tokens, plan.nbytes) == (1000, 4 * 1024, 4 * 1024 * 1024)


def test_auto_takes_the_models_window_when_it_fits() -> None:
    assert plan_cache(available=16 * GIB, context=0, **FACTS).context == 65536


def test_auto_shrinks_to_what_fits_and_no_further() -> None:
    available = RESERVE_BYTES + FACTS["weights"] + 100 * 256 * 1024 * 4 + 5
    plan = plan_cache(available=available, context=0, **FACTS)
    assert plan.context == 100 * 256
    assert plan.nbytes <= available - RESERVE_BYTES - FACTS["weights"] < plan.nbytes + 256 * 1024 * 4


def test_a_window_that_does_not_fit_is_refused_with_figures_and_the_one_that_does() -> None:
    available = RESERVE_BYTES + FACTS["weights"] + 100 * 256 * 1024 * 4
    with pytest.raises(MemoryShortError, match=r"--context 25600 fits"):
        plan_cache(available=available, context=25601, **FACTS)


@pytest.mark.parametrize("context", [0, 256])
def test_weights_that_do_not_fit_are_refused(context: int) -> None:
    with pytest.raises(MemoryShortError, match="no window fits"):
        plan_cache(available=2 * GIB, context=context, **FACTS)


def test_available_memory_is_linux_own_estimate(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemFree:  10 kB\nMemAvailable:  77 kB\n")
    assert available_bytes(meminfo) == 77 * 1024
    assert available_bytes(tmp_path / "absent") > 2**20
