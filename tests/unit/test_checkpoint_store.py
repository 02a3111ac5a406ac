"""The safetensors reader against the safetensors library, and every way a checkpoint's files can be broken."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tfglm.checkpoint import store
from tfglm.checkpoint.config import ModelConfig
from tfglm.checkpoint.names import expected_tensors
from tfglm.checkpoint.presets import preset_config
from tfglm.checkpoint.safetensors import read_header
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SMALL = {
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "vocab_size": 384,
}
QA = "model.layers.0.self_attn.q_a_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "model", "tiny", 0, **SMALL)
    return tmp_path / "model"


def library_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().view(torch.uint8).numpy().tobytes()


def test_every_tensor_equals_the_librarys(folder: Path) -> None:
    reference = library_tensors(folder)
    with Checkpoint.open(folder) as checkpoint:
        assert set(checkpoint.entries) == set(reference)
        assert checkpoint.nbytes == sum(tensor.nbytes for tensor in reference.values())
        for name, tensor in reference.items():
            assert bits(checkpoint.read(name)) == bits(tensor), name


@pytest.mark.parametrize("page_bytes", [1, 4096], ids=["row by row", "in blocks"])
def test_slices_equal_the_librarys(folder: Path, monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    monkeypatch.setattr(store, "_PAGE_BYTES", page_bytes)
    monkeypatch.setattr(store, "_BLOCK_BYTES", 1000)  # several blocks, the last one not full
    tensor = library_tensors(folder)[QA]
    rows, columns = tensor.shape
    cuts = [slice(None), slice(0, 0), slice(0, 1), slice(3, 17), slice(columns - 5, None), slice(None, 7)]
    with Checkpoint.open(folder) as checkpoint:
        for row in [None, slice(0, rows), slice(5, 5), slice(2, 31), slice(rows - 1, rows)]:
            for column in [None, *cuts]:
                expected = tensor[row or slice(None), column or slice(None)]
                got = checkpoint.read(QA, rows=row, columns=column)
                assert bits(got) == bits(expected), (row, column)
                assert got.is_contiguous()
        norm = "model.norm.weight"
        assert bits(checkpoint.read(norm, rows=slice(3, 9))) == bits(library_tensors(folder)[norm][3:9])


def test_a_column_slice_reads_no_more_than_it_needs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long rows are read piece by piece, so that a rank does not fetch the other ranks' columns over the network."""
    monkeypatch.setattr(store, "_PAGE_BYTES", 64)
    read = 0
    real_preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        nonlocal read
        got = real_preadv(fd, buffers, offset)
        read += got
        return got

    with Checkpoint.open(folder) as checkpoint:
        monkeypatch.setattr(os, "preadv", counting)
        part = checkpoint.read(QA, columns=slice(8, 24))
        assert read == part.nbytes
        checkpoint.read(QA, rows=slice(1, 3))
        assert read == part.nbytes + 2 * 64 * 2


def test_reads_go_on_when_the_system_returns_less(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One preadv moves at most 2 GiB; here at most 1,000 bytes."""
    real_preadv = os.preadv
    reference = library_tensors(folder)["lm_head.weight"]
    with Checkpoint.open(folder) as checkpoint:
        monkeypatch.setattr(os, "preadv", lambda fd, views, offset: real_preadv(fd, [views[0][:1000]], offset))
        assert bits(checkpoint.read("lm_head.weight")) == bits(reference)


def test_offsets_beyond_4_gib(tmp_path: Path) -> None:
    """A sparse file costs no disk: only its last row is written."""
    rows, columns = (1 << 18) + 1, 1 << 14
    nbytes = rows * columns * 2
    header = json.dumps({"big": {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [0, nbytes]}})
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(file.tell() + nbytes)
        file.seek(-columns * 2, os.SEEK_END)
        file.write(np.full(columns, 0x3F80, dtype="<u2").tobytes())
    fd = os.open(path, os.O_RDONLY)
    try:
        [entry] = read_header(fd, path)
        tensor = store._read_slice(fd, entry, slice(rows - 2, None), slice(0, 100))
    finally:
        os.close(fd)
    assert tensor.tolist() == [[0.0] * 100, [1.0] * 100]


@pytest.mark.parametrize("part", [slice(0, 10, 2), slice(5, 3), slice(-3, None), slice(0, 10_000), slice(9999, None)])
def test_slices_that_are_no_range_within_the_tensor(folder: Path, part: slice) -> None:
    with Checkpoint.open(folder) as checkpoint:
        for dimension in ("rows", "columns"):
            with pytest.raises(ValueError, match="is not a range within it"):
                checkpoint.read(QA, **{dimension: part})
        with pytest.raises(ValueError, match="no dimension 1"):
            checkpoint.read("model.norm.weight", columns=slice(0, 1))


def test_every_dtype_of_the_library(tmp_path: Path) -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.int32]
    dtypes += [torch.float32, torch.int64, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in dtypes}
    tensors["scalar"] = torch.tensor(2.5)
    tensors["empty"] = torch.zeros(0, 4)
    tensors["deep"] = torch.arange(24.0).reshape(2, 3, 4)
    path = tmp_path / "x.safetensors"
    save_file(tensors, path, metadata={"note": "any"})
    fd = os.open(path, os.O_RDONLY)
    try:
        entries = {entry.name: entry for entry in read_header(fd, path)}
        assert set(entries) == set(tensors)
        for name, tensor in tensors.items():
            got = store._read_slice(fd, entries[name], None, None)
            assert got.dtype == tensor.dtype
            assert got.shape == tensor.shape
            assert got.double().equal(tensor.double())
        assert store._read_slice(fd, entries["deep"], slice(1, 2), slice(1, 3)).equal(tensors["deep"][1:2, 1:3])
    finally:
        os.close(fd)


def test_single_file_checkpoint(folder: Path, tmp_path: Path) -> None:
    tensors = library_tensors(folder)
    for file in [*folder.glob("*.safetensors"), folder / INDEX]:
        file.unlink()
    save_file(tensors, folder / "model.safetensors")
    with Checkpoint.open(folder) as checkpoint:
        assert bits(checkpoint.read(QA)) == bits(tensors[QA])


def test_threads_read_the_same_bits(folder: Path) -> None:
    reference = {name: bits(tensor) for name, tensor in library_tensors(folder).items()}
    with Checkpoint.open(folder) as checkpoint, ThreadPoolExecutor(8) as pool:
        names = list(reference) * 4
        for name, tensor in zip(names, pool.map(checkpoint.read, names), strict=True):
            assert bits(tensor) == reference[name]


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts open files in /proc")
def test_no_file_stays_open(folder: Path) -> None:
    before = open_files()
    checkpoint = Checkpoint.open(folder)
    assert open_files() == before + len(list(folder.glob("*.safetensors")))
    checkpoint.close()
    checkpoint.close()
    assert open_files() == before
    last = sorted(folder.glob("*.safetensors"))[-1]
    os.truncate(last, last.stat().st_size - 1)
    with pytest.raises(CheckpointError):
        Checkpoint.open(folder)
    assert open_files() == before


def test_reading_after_close(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    checkpoint.close()
    with pytest.raises(CheckpointError, match="is closed"):
        checkpoint.read(QA)


def test_close_waits_for_a_read_in_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A descriptor closed under a read could by then belong to another file."""
    checkpoint = Checkpoint.open(folder)
    reading, go_on = threading.Event(), threading.Event()
    real_preadv = os.preadv

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        reading.set()
        assert go_on.wait(30)
        return real_preadv(fd, views, offset)

    monkeypatch.setattr(os, "preadv", slow)
    with ThreadPoolExecutor(2) as pool:
        read = pool.submit(checkpoint.read, QA)
        assert reading.wait(30)
        close = pool.submit(checkpoint.close)
        assert not close.done()
        go_on.set()
        close.result(30)
        assert bits(read.result(30)) == bits(library_tensors(folder)[QA])


# What can be wrong with the files. Each case changes a good checkpoint; the error must name tensor and file.


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's JSON header and leave its data."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def rewrite_shard(file: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    return str(caught.value)


def test_missing_tensor(folder: Path) -> None:
    file = shard_of(folder, QA)
    rewrite_shard(file, lambda tensors: tensors.pop(QA))
    assert QA in (message := refused(folder))
    assert file.name in message
    rewrite_index(folder, lambda index: index["weight_map"].pop(QA))
    assert f"are missing: {QA}" in refused(folder)


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_routed_experts": 5}))
    message = refused(folder)  # three matrices of expert 4, in layer 1 and in the MTP layer
    assert "model.layers.1.mlp.experts.4.gate_proj.weight" in message
    assert "and 3 more (6 in all)" in message


def test_extra_tensor(folder: Path) -> None:
    file = shard_of(folder, QA)
    rewrite_shard(file, lambda tensors: tensors.update({"model.extra": torch.zeros(3)}))
    assert "model.extra" in (message := refused(folder))
    assert "does not list" in message
    rewrite_index(folder, lambda index: index["weight_map"].update({"model.extra": file.name}))
    assert "no place for: model.extra" in (message := refused(folder))
    assert file.name in message


def test_wrong_shape_and_wrong_dtype(folder: Path) -> None:
    file = shard_of(folder, QA)
    rewrite_shard(file, lambda tensors: tensors.update({QA: tensors[QA].T.contiguous().reshape(32, -1)}))
    message = refused(folder)
    assert f"{file}: tensor {QA} is BF16 [32, 128]; config.json asks for BF16 [64, 64]" in message
    rewrite_shard(file, lambda tensors: tensors.update({QA: tensors[QA].reshape(64, 64).half()}))
    assert f"tensor {QA} is F16 [64, 64]; config.json asks for BF16 [64, 64]" in refused(folder)


def test_router_bias_must_be_float32(folder: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rewrite_shard(shard_of(folder, name), lambda tensors: tensors.update({name: tensors[name].bfloat16()}))
    assert f"{name} is BF16 [4]; config.json asks for F32 [4]" in refused(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name = next(iter(load_file(first)))
    rewrite_shard(second, lambda tensors: tensors.update({name: torch.zeros(2)}))
    message = refused(folder)
    assert name in message
    assert first.name in message
    assert second.name in message


def test_index_against_shards(folder: Path) -> None:
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    home = shard_of(folder, QA).name
    other = next(name for name in shards if name != home)
    rewrite_index(folder, lambda index: index["weight_map"].update({QA: other}))
    assert f"lists tensor {QA} in {other}" in refused(folder)


def test_index_names_missing_files(folder: Path) -> None:
    shard_of(folder, QA).unlink()
    assert "names files that do not exist: model-0000" in refused(folder)


@pytest.mark.parametrize("file", ["../evil.safetensors", "sub/x.safetensors", "/etc/passwd", "..", "", 3, None])
def test_index_must_stay_in_the_folder(folder: Path, file: object) -> None:
    rewrite_index(folder, lambda index: index["weight_map"].update({QA: file}))
    assert f"tensor {QA} is in {file!r}; a file name in its folder is needed" in refused(folder)


def test_index_with_a_file_name_that_no_disk_can_hold(folder: Path) -> None:
    rewrite_index(folder, lambda index: index["weight_map"].update({QA: "x" * 5000}))
    message = refused(folder)
    assert f"tensor {QA} is in 'xxxx" in message
    assert len(message) < 1000


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_weight_map(folder: Path, weight_map: object) -> None:
    rewrite_index(folder, lambda index: index.update({"weight_map": weight_map}))
    assert "weight_map is" in refused(folder)


def test_index_that_is_no_json(folder: Path) -> None:
    (folder / INDEX).write_text("{\n,")
    assert "line 2" in refused(folder)


def test_no_weights_at_all(folder: Path, tmp_path: Path) -> None:
    (folder / INDEX).unlink()
    assert f"{INDEX} does not exist" in refused(folder)
    assert "is not a folder" in refused(tmp_path / "nowhere")


def test_truncated_shard(folder: Path) -> None:
    file = shard_of(folder, "lm_head.weight")
    os.truncate(file, file.stat().st_size - 100)
    message = refused(folder)
    assert f"{file} is truncated: tensor" in message
    os.truncate(file, 20)
    assert "is no whole safetensors file" in refused(folder)
    os.truncate(file, 0)
    assert "is no whole safetensors file: 0 bytes" in refused(folder)


def test_shard_cut_after_opening(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        entry = checkpoint.entries[QA]
        os.truncate(entry.file, entry.offset + 10)
        with pytest.raises(CheckpointError, match=f"ends inside tensor {QA}"):
            checkpoint.read(QA)


def test_bytes_after_the_last_tensor(folder: Path) -> None:
    file = shard_of(folder, QA)
    with file.open("ab") as out:
        out.write(b"xx")
    assert "has 2 bytes after its last tensor" in refused(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "BF17"}, "has dtype 'BF17'; known:"),
        ({"dtype": ["BF16"]}, "is described by"),
        ({"shape": [64, -64]}, "is described by"),
        ({"shape": [64, "64"]}, "is described by"),
        ({"shape": [64, True]}, "is described by"),
        ({"shape": 64}, "is described by"),
        ({"shape": [64, 65]}, "needs 8320 bytes"),
        ({"data_offsets": [0]}, "is described by"),
        ({"shape": [10**4000, 10**4000]}, "is described by"),
        ({"shape": [2**62] * 300}, "is described by"),
        ({"dtype": "F" * 10_000}, "known: BOOL"),
        ({"data_offsets": None}, "is described by"),
        ({"data_offsets": [-2, 4]}, "is described by"),
        ({"data_offsets": [64, 0]}, "give -64"),
        ({"data_offsets": [1 << 70, (1 << 70) + 8192]}, "leaves a gap before it"),
    ],
)
def test_bad_descriptions_in_a_header(folder: Path, change: dict[str, object], message: str) -> None:
    file = shard_of(folder, QA)
    rewrite_header(file, lambda header: header[QA].update(change))
    got = refused(folder)
    assert message in got
    assert str(file) in got


def test_overlap_in_a_header(folder: Path) -> None:
    file = shard_of(folder, QA)

    def overlap(header: dict[str, Any]) -> None:
        names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        header[names[1]]["data_offsets"] = [offset - 2 for offset in header[names[1]]["data_offsets"]]

    rewrite_header(file, overlap)
    assert "overlaps the tensor before it" in refused(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((1 << 60).to_bytes(8, "little") + b"{}", "with a header of 1152921504606846976 announced"),
        ((2).to_bytes(8, "little") + b"[]", "a JSON array; an object is needed"),
        ((2).to_bytes(8, "little") + b"{,", "is not JSON"),
        ((2).to_bytes(8, "little") + b"\xff\xff", "is not UTF-8"),
        ((16).to_bytes(8, "little") + b'{"a":1,  "a":2} ', "'a' is given more than once"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "is described by 1"),
    ],
)
def test_bad_headers(folder: Path, data: bytes, message: str) -> None:
    file = shard_of(folder, QA)
    file.write_bytes(data)
    got = refused(folder)
    assert message in got
    assert str(file) in got


def test_header_longer_than_the_format_allows(folder: Path) -> None:
    file = shard_of(folder, QA)
    file.write_bytes((100_000_001).to_bytes(8, "little"))
    os.truncate(file, 100_000_100)
    assert "the header is 100000001 bytes; at most 100000000" in refused(folder)


def test_lost_mtp_layer_is_explained(folder: Path) -> None:
    """transformers drops the MTP layer on load, so what it saves names one and has none."""
    for file in folder.glob("*.safetensors"):
        rewrite_shard(file, lambda tensors: [tensors.pop(n) for n in list(tensors) if n.startswith("model.layers.2.")])
    kept = library_tensors(folder)
    rewrite_index(
        folder, lambda index: index.update(weight_map={n: f for n, f in index["weight_map"].items() if n in kept})
    )
    message = refused(folder)
    assert "num_nextn_predict_layers is 1 but no tensor model.layers.2.* exists" in message
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
    Checkpoint.open(folder).close()


def test_other_quantised_formats_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    assert "quant_method is 'gptq'; supported: 'exl3'" in refused(folder)


def test_real_size_has_the_published_number_of_parameters() -> None:
    """As published of GLM-5.2 (the same architecture) with its MTP layer; router biases are not counted."""
    raw = preset_config("full-layers", {"num_hidden_layers": 78, "n_routed_experts": 256})
    specs = expected_tensors(ModelConfig.from_dict(raw))
    counts = {name: int(np.prod(spec.shape)) for name, spec in specs.items() if spec.dtype == "BF16"}
    assert sum(counts.values()) == 753_329_921_024
    assert sum(name.startswith("model.layers.78.") for name in specs) == 791
