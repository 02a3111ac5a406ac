"""Which tensors form an EXL3 linear, and the look-alikes that are refused by name."""

from dataclasses import dataclass

import pytest

from tfglm.errors import CheckpointError
from tfglm.formats.exl3_tensors import Exl3Linear, check_marker, check_quantization_config, find_linears

P = "model.layers.3.mlp.experts.0.gate_proj"


@dataclass(frozen=True)
class Header:
    dtype: str
    shape: tuple[int, ...]


def pack(prefix: str = P, k: int = 256, n: int = 128, width: int = 48, marker: str | None = "mcg") -> dict[str, Header]:
    tensors = {
        f"{prefix}.trellis": Header("I16", (k // 16, n // 16, width)),
        f"{prefix}.suh": Header("F16", (k,)),
        f"{prefix}.svh": Header("F16", (n,)),
    }
    return tensors | ({f"{prefix}.{marker}": Header("I32", ())} if marker else {})


def test_linears_among_other_tensors() -> None:
    other = "model.layers.3.mlp.experts.1.down_proj"
    headers = {
        "model.norm.weight": Header("BF16", (256,)),
        **pack(),
        **pack(other, 128, 256, 40, "mul1"),
        f"{other}.mul1": Header("I32", (1,)),  # a marker of shape [1] is as good as a scalar
        f"{other}.bias": Header("F32", (256,)),
    }
    assert find_linears(headers) == {
        P: Exl3Linear(256, 128, 3.0, "mcg", False, ("mcg", "suh", "svh", "trellis")),
        other: Exl3Linear(128, 256, 2.5, "mul1", False, ("bias", "mul1", "suh", "svh", "trellis")),
    }
    assert find_linears(headers)[other].trellis_bytes == 128 * 256 * 5 // 16


def test_old_packs_with_sign_words() -> None:
    headers = {
        f"{P}.trellis": Header("I16", (16, 8, 32)),
        f"{P}.su": Header("I16", (16,)),
        f"{P}.sv": Header("I16", (8,)),
    }
    assert find_linears(headers)[P] == Exl3Linear(256, 128, 2.0, "3inst", True, ("su", "sv", "trellis"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{P}.mul1": Header("I32", ())}, f"{P} has both markers mcg and mul1"),
        ({f"{P}.scale": Header("F16", (1,))}, f"tensor {P}.scale: .* extinct"),
        ({f"{P}.sqg": Header("I32", ())}, f"tensor {P}.sqg has no place in an EXL3 linear"),
        ({f"{P}.weight": Header("BF16", (128, 256))}, f"tensor {P}.weight has no place"),
        ({f"{P}.su": Header("I16", (16,))}, f"tensor {P}.su has no place"),
        ({f"{P}.svh": None}, f"{P}.svh is missing"),
        ({f"{P}.trellis": None}, f"{P}.trellis is missing"),
        ({f"{P}.suh": Header("F16", (128,))}, rf"tensor {P}.suh is F16 \[128\]; its trellis asks for F16 \[256\]"),
        ({f"{P}.svh": Header("BF16", (128,))}, rf"tensor {P}.svh is BF16 \[128\]; its trellis asks for F16"),
        ({f"{P}.mcg": Header("I32", (2,))}, rf"tensor {P}.mcg is I32 \[2\]"),
        ({f"{P}.trellis": Header("I16", (16, 4, 48))}, "multiples of 128 is needed"),
        ({f"{P}.trellis": Header("I16", (16, 8))}, "multiples of 128 is needed"),
        ({f"{P}.trellis": Header("I16", (16, 8, 40))}, "2.5 bits does not exist in codebook mcg"),
        ({f"{P}.trellis": Header("I32", (16, 8, 48))}, "trellis is I32"),
        ({f"{P}.rank0.trellis": Header("I16", (8, 8, 48))}, rf"tensor {P}.rank0.trellis is one rank's slice"),
    ],
)
def test_look_alikes_are_refused_by_name(change: dict[str, Header | None], message: str) -> None:
    headers = {name: header for name, header in (pack() | change).items() if header is not None}
    with pytest.raises(CheckpointError, match=message):
        find_linears(headers)


def test_marker_values() -> None:
    check_marker(f"{P}.mcg", 0xCBAC1FED)
    check_marker(f"{P}.mcg", 0xCBAC1FED - 2**32)
    check_marker(f"{P}.mul1", 0x83DCD12D - 2**32)
    with pytest.raises(CheckpointError, match=rf"tensor {P}.mcg is 0x53514731, .* 0xCBAC1FED is needed"):
        check_marker(f"{P}.mcg", 0x53514731)


def test_quantization_config() -> None:
    check_quantization_config({"quant_method": "exl3", "bits": 2.75, "codebook": "mcg", "scope": "experts"})
    check_quantization_config({"quant_method": "exl3"})
    for broken, message in [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'; supported: 'exl3'"),
        ({"quant_method": "exl3", "rotation_layout": "shared_h_v1"}, "rotation_layout is 'shared_h_v1'"),
        ({"quant_method": "exl3", "codebook": "sqg"}, "codebook is 'sqg'"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            check_quantization_config(broken)
