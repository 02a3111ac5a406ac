"""The kernel build: cache, errors, declared limits. Compiles for a GPU that need not be there."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tfglm.cli.main import main
from tfglm.ops import nvrtc

try:
    nvrtc.compiler_version()
except nvrtc.KernelBuildError:
    pytest.skip("no libnvrtc installed (pip install nvidia-cuda-nvrtc)", allow_module_level=True)

GOOD = '#include "shared.cuh"\nextern "C" __global__ void answer(int* out) { *out = ANSWER; }\n'


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of kernel sources in place of the package's own."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    (folder / "shared.cuh").write_text("#pragma once\nconstexpr int ANSWER = 42;\n")
    (folder / "good.cu").write_text(GOOD)
    monkeypatch.setattr(nvrtc.resources, "files", lambda package: folder)
    return folder


def test_cubin_is_machine_code_for_the_architecture(kernels: Path, tmp_path: Path) -> None:
    machine_codes = set()
    for arch in ("sm_90", "sm_121"):
        cubin = nvrtc.compile("good", arch, cache=tmp_path / "cache").cubin
        assert cubin.startswith(b"\x7fELF")
        assert struct.unpack_from("<H", cubin, 18)[0] == 190  # EM_CUDA
        machine_codes.add(struct.unpack_from("<I", cubin, 48)[0])  # e_flags holds the architecture
    assert len(machine_codes) == 2


def test_second_compilation_in_another_process_comes_from_the_cache(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from tfglm.ops import nvrtc;"
        "b = nvrtc.compile('exl3_reconstruct', 'sm_90', {'CODEBOOK': '1'}, Path(sys.argv[1])); print(b.from_cache)"
    )
    run = [sys.executable, "-c", script, str(tmp_path)]
    answers = [subprocess.run(run, check=True, capture_output=True, text=True, timeout=120).stdout for _ in range(2)]
    assert answers == ["False\n", "True\n"]
    assert len(list(tmp_path.iterdir())) == 1  # no temporary file is left


@pytest.mark.parametrize("change", ["include", "source", "macro", "arch"])
def test_every_input_is_part_of_the_key(kernels: Path, tmp_path: Path, change: str) -> None:
    cache = tmp_path / "cache"
    nvrtc.compile("good", "sm_90", {"N": "1"}, cache)
    assert nvrtc.compile("good", "sm_90", {"N": "1"}, cache).from_cache
    arch, macros = "sm_90", {"N": "1"}
    if change == "include":
        (kernels / "shared.cuh").write_text("#pragma once\nconstexpr int ANSWER = 43;\n")
    elif change == "source":
        (kernels / "good.cu").write_text(GOOD + "\n")
    elif change == "macro":
        macros = {"N": "2"}
    else:
        arch = "sm_89"
    assert not nvrtc.compile("good", arch, macros, cache).from_cache


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "foreign"])
def test_damaged_entry_is_built_again(kernels: Path, tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    built = nvrtc.compile("good", "sm_90", cache=cache)
    (entry,) = cache.iterdir()
    data = entry.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    entry.write_bytes({"cut": data[:-9], "flipped": flipped, "empty": b"", "foreign": b"\x7fELF" + data}[damage])
    again = nvrtc.compile("good", "sm_90", cache=cache)
    assert not again.from_cache
    assert hashlib.sha256(again.cubin).digest() == hashlib.sha256(built.cubin).digest()
    assert nvrtc.compile("good", "sm_90", cache=cache).from_cache


def test_cache_that_cannot_be_written_does_not_stop_a_start(kernels: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    assert nvrtc.compile("good", "sm_90", cache=tmp_path / "file" / "cache").cubin


def test_error_carries_file_line_and_options(kernels: Path, tmp_path: Path) -> None:
    (kernels / "bad.cu").write_text('#include "shared.cuh"\n\nextern "C" __global__ void k() { undeclared = 1; }\n')
    with pytest.raises(nvrtc.KernelBuildError, match=r"sm_90[\s\S]*bad\.cu\(3\)[\s\S]*undeclared"):
        nvrtc.compile("bad", "sm_90", cache=tmp_path)


def test_check_fails_on_spills_that_the_header_forbids(
    kernels: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert nvrtc.check(("sm_90",)) == 0
    body = (
        'extern "C" __global__ void __maxnreg__(24) crowded(float* x) {\n'
        "float v[64];\n#pragma unroll\nfor (int i = 0; i < 64; ++i) v[i] = x[i * 32];\n__syncthreads();\n"
        "#pragma unroll\nfor (int i = 0; i < 64; ++i) x[i] = v[63 - i] * v[i];\n}\n"
    )
    (kernels / "crowded.cu").write_text("//! no-spills\n" + body)
    assert nvrtc.check(("sm_90",)) == 1
    assert "crowded spills" in capsys.readouterr().out
    (kernels / "crowded.cu").write_text("//! spills 4000\n" + body)
    assert nvrtc.check(("sm_90",)) == 0
    (kernels / "crowded.cu").write_text("//! limit sm_90: registers 16\n" + body)
    assert nvrtc.check(("sm_90",)) == 1
    assert nvrtc.check(("sm_89",)) == 0


def test_variants_are_read_from_the_header(kernels: Path) -> None:
    (kernels / "many.cu").write_text("//! variant: A=1 B=2\n//! variant:\n" + GOOD)
    assert nvrtc.variants("many") == [{"A": "1", "B": "2"}, {}]
    assert nvrtc.variants("good") == [{}]


def test_a_second_build_compiles_nothing(
    kernels: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a start after it: what servers ask for is what was built."""
    (kernels / "many.cu").write_text("//! variant: A=1 B=2\n//! variant: A=2\n" + GOOD)
    compiled: list[str] = []
    compiler = nvrtc._nvrtc
    monkeypatch.setattr(
        nvrtc, "_nvrtc", lambda text, name, options: (compiled.append(name), compiler(text, name, options))[1]
    )
    command = ["kernels", "build", "--arch", "sm_121", "--arch", "sm_90", "--cache", str(tmp_path / "cache")]
    assert main(command) == 0
    assert sorted(compiled) == ["good.cu"] * 2 + ["many.cu"] * 4
    assert main(command) == 0
    assert len(compiled) == 6
    out = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in out] == [
        f"{a}: 3 kernels in {tmp_path / 'cache'}" for a in ("sm_121", "sm_90")
    ] * 2
    assert ["3 of them compiled now" in line for line in out] == [True, True, False, False]
    assert nvrtc.compile("many", "sm_90", {"B": "2", "A": "1"}, tmp_path / "cache").from_cache


@pytest.mark.parametrize("name", ["good", "good.cu", "tfglm/kernels/good.cu"])
def test_a_file_is_named_with_or_without_its_ending(kernels: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    checked: list[object] = []
    monkeypatch.setattr(nvrtc, "check", lambda **what: checked.append(what["only"]))
    assert main(["kernels", "check", name]) == 0
    assert checked == ["good"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["build", "--arch", "121"], "an architecture such as sm_89, sm_90, sm_120, sm_121 is needed"),
        (["check", "best"], "no kernel file 'best'; there are good, all"),
    ],
)
def test_a_command_that_names_nothing_there_is(
    kernels: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["kernels", *words]) == 1
    assert told in capsys.readouterr().err
