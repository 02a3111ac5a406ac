import pytest
import torch

from tfglm.engine import device
from tfglm.engine.device import choose_device, memory_budget
from tfglm.errors import ConfigError
from tfglm.memory.info import read_memory


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends to a GPU of a given compute capability, or to none."""

    def pretend(capability: tuple[int, int] | None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")

    return pretend


@pytest.mark.parametrize(
    ("asked", "capability", "chosen"),
    [
        ("auto", None, "cpu"),
        ("auto", (12, 1), "cuda"),
        ("auto", (8, 9), "cuda"),
        ("auto", (8, 6), "cpu"),
        ("cpu", (12, 1), "cpu"),
        ("cuda", (8, 9), "cuda"),
    ],
)
def test_a_gpu_is_taken_where_one_can_be_used(gpu, asked: str, capability: tuple[int, int] | None, chosen: str) -> None:
    gpu(capability)
    assert choose_device(asked, "bf16", "bf16", "bf16") == chosen


@pytest.mark.parametrize(("capability", "words"), [(None, "no NVIDIA GPU"), ((8, 6), "8.6 and 8.9 is needed")])
def test_a_gpu_that_cannot_serve_is_refused_when_asked_for(gpu, capability: tuple[int, int] | None, words: str) -> None:
    gpu(capability)
    with pytest.raises(ConfigError, match=words):
        choose_device("cuda", "bf16", "bf16", "bf16")


@pytest.mark.parametrize(
    ("capability", "formats", "words"),
    [
        ((9, 0), ("fp32", "bf16", "bf16"), "--kv is 'fp32'; --device cuda has .*--device cpu has it"),
        (None, ("bf16", "q4", "bf16"), "dense is 'q4'"),
        (None, ("bf16", "bf16", "fp8"), "head is 'fp8'"),
    ],
)
def test_a_format_the_device_lacks_is_refused(gpu, capability, formats: tuple[str, str, str], words: str) -> None:
    gpu(capability)
    with pytest.raises(ConfigError, match=words):
        choose_device("cuda" if capability else "auto", *formats)


def test_the_budget_is_the_gpus_own_memory_only_where_it_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        is_integrated = False

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (123, 456))
    monkeypatch.setattr(device, "read_memory", lambda: read_memory().__class__(1000, 77))
    assert memory_budget("cuda") == 123
    assert memory_budget("cpu") == 77
    Properties.is_integrated = True
    assert memory_budget("cuda") == 77
