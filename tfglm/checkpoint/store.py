"""A checkpoint folder, opened: every header checked, tensors read by slice on demand.

Reads go through pread into the tensor that is returned: nothing is mapped, nothing is held twice, and the page cache is
the only cache. Threads may read at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import torch

from tfglm.checkpoint.config import ModelConfig, require_folder
from tfglm.checkpoint.jsonfile import read_object, shown
from tfglm.checkpoint.names import TensorSpec, expected_tensors, layer_prefix
from tfglm.checkpoint.safetensors import INDEX_FILE, ITEM_BYTES, SINGLE_FILE, TensorEntry, read_header
from tfglm.errors import CheckpointError
from tfglm.formats.exl3_code import BLOCK
from tfglm.formats.exl3_tensors import Exl3Linear, check_quantization_config, find_linears

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
}

_BLOCK_BYTES = 4 << 20
"""Scratch of a column read."""
_READ_BYTES = 1 << 30
"""Of one system call: Linux cuts longer reads at 2 GiB, macOS refuses them."""
_PAGE_BYTES = 4096
"""A gap between two wanted runs shorter than this costs the disk nothing: it is in a page that is read anyway."""


class Checkpoint:
    """An open checkpoint whose files hold exactly the tensors its config asks for.

    config: the model's facts. entries: where each tensor lies. linears: those stored as EXL3, by their name without
    ".weight". shapes: of each of these, outputs and inputs before padding. nbytes: bytes of all tensors.
    decoded_nbytes: the same once every EXL3 linear has been decoded to fp16 beside its bits, as the CPU path does.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        entries: Mapping[str, TensorEntry],
        linears: Mapping[str, Exl3Linear],
        shapes: Mapping[str, tuple[int, ...]],
        fds: dict[Path, int],
    ) -> None:
        self.path = path
        self.config = config
        self.entries: Mapping[str, TensorEntry] = MappingProxyType(dict(entries))
        self.linears: Mapping[str, Exl3Linear] = MappingProxyType(dict(linears))
        self.shapes: Mapping[str, tuple[int, ...]] = MappingProxyType(dict(shapes))
        self.nbytes = sum(entry.nbytes for entry in entries.values())
        self.decoded_nbytes = self.nbytes + sum(2 * linear.k * linear.n for linear in linears.values())
        self._fds = fds
        self._idle = threading.Condition()
        self._reading = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Open the folder `path`: config.json, the index (or a single model.safetensors), the header of every shard.

        Raises ConfigError for a config this program cannot honour and CheckpointError for files that do not hold what
        it says: a missing shard, a truncated one, a missing, extra, repeated, mis-shaped or wrong-dtype tensor.
        """
        folder = Path(path)
        require_folder(folder)
        config = ModelConfig.from_file(folder / "config.json")
        expected = expected_tensors(config)
        fds: dict[Path, int] = {}
        try:
            entries = _read_entries(folder, fds)
            linears = _find_linears(folder, config, entries)
            _check_tensors(folder, config, _with_linears(expected, linears, entries), entries)
        except BaseException:
            _close_all(fds)
            raise
        shapes = {name: expected[f"{name}.weight"].shape for name in linears}
        return cls(folder, config, entries, linears, shapes, fds)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> torch.Tensor:
        """A tensor, or rows of its first and columns of its second dimension, in memory of its own.

        Slices have step 1 and lie within the tensor. Raises CheckpointError for an unknown name or a file that changed.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path} holds no tensor {name}")
        with self._idle:
            if not self._fds:
                raise CheckpointError(f"{self.path} is closed; {name} cannot be read")
            fd = self._fds[entry.file]
            self._reading += 1
        try:
            return _read_slice(fd, entry, rows, columns)
        finally:
            with self._idle:
                self._reading -= 1
                self._idle.notify_all()

    def close(self) -> None:
        """Close every file, after the reads in progress. Reading afterwards is an error; closing again is not."""
        with self._idle:
            fds, self._fds = self._fds, {}
            self._idle.wait_for(lambda: self._reading == 0)
        _close_all(fds)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _close_all(fds: dict[Path, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _read_entries(folder: Path, fds: dict[Path, int]) -> dict[str, TensorEntry]:
    """The tensors of every shard by name; opens the shards into `fds`."""
    index_path = folder / INDEX_FILE
    if not index_path.exists() and (folder / SINGLE_FILE).exists():
        return {entry.name: entry for entry in _open_shard(folder / SINGLE_FILE, fds)}
    index = _read_index(index_path)
    missing = sorted(file for file in set(index.values()) if not (folder / file).is_file())
    if missing:
        raise CheckpointError(f"{index_path} names files that do not exist: {_few(missing)}")
    entries: dict[str, TensorEntry] = {}
    for file in sorted(set(index.values())):
        for entry in _open_shard(folder / file, fds):
            if entry.name in entries:
                raise CheckpointError(f"tensor {entry.name} is in both {entries[entry.name].file} and {entry.file}")
            if entry.name not in index:
                raise CheckpointError(f"{entry.file} holds tensor {entry.name}, which {index_path} does not list")
            entries[entry.name] = entry
    for name, file in index.items():
        if name not in entries or entries[name].file.name != file:
            raise CheckpointError(f"{index_path} lists tensor {name} in {file}, which does not hold it")
    return entries


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name to shard file name."""
    weight_map: Any = read_object(path, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{path}: weight_map is {shown(weight_map)}; an object of tensor names and file names is needed"
        )
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", "..") or len(file) > 255:
            raise CheckpointError(f"{path}: tensor {name} is in {shown(file)}; a file name in its folder is needed")
    return weight_map


def _open_shard(file: Path, fds: dict[Path, int]) -> list[TensorEntry]:
    try:
        fds[file] = os.open(file, os.O_RDONLY)
        return read_header(fds[file], file)
    except OSError as exc:
        raise CheckpointError(f"{file} cannot be read: {exc.strerror}") from None


def _find_linears(folder: Path, config: ModelConfig, entries: Mapping[str, TensorEntry]) -> dict[str, Exl3Linear]:
    """The EXL3 linears; the headers decide which, quantization_config only must not contradict."""
    try:
        if config.quantization is not None:
            check_quantization_config(config.quantization)
        return find_linears(entries)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error.message}") from None


def _with_linears(
    expected: Mapping[str, TensorSpec], linears: Mapping[str, Exl3Linear], entries: Mapping[str, TensorEntry]
) -> dict[str, TensorSpec]:
    """The expected tensors with every quantised matrix replaced by the tensors that stand for it.

    What is left alone (a trellis of something that is no matrix of this model, a bias) is then found to be extra.
    """
    specs = dict(expected)
    for prefix, linear in linears.items():
        matrix = specs.get(f"{prefix}.weight")
        if matrix is None or len(matrix.shape) != 2 or prefix == "model.embed_tokens":
            continue
        padded = tuple(-(-size // BLOCK) * BLOCK for size in matrix.shape)
        if (linear.n, linear.k) != padded:
            where = entries[f"{prefix}.trellis"].file
            raise CheckpointError(
                f"{where}: tensor {prefix}.trellis is a matrix of {linear.n} outputs and {linear.k} inputs; "
                f"config.json asks for {padded[0]} and {padded[1]} (multiples of {BLOCK})"
            )
        del specs[f"{prefix}.weight"]
        for field in linear.fields:
            if field != "bias":
                entry = entries[f"{prefix}.{field}"]
                specs[entry.name] = TensorSpec(entry.shape, entry.dtype)
    return specs


def _check_tensors(
    folder: Path, config: ModelConfig, expected: Mapping[str, TensorSpec], entries: Mapping[str, TensorEntry]
) -> None:
    missing = [name for name in expected if name not in entries]
    mtp = layer_prefix(config.num_hidden_layers) + "."
    if config.num_nextn_predict_layers and missing and not any(name.startswith(mtp) for name in entries):
        # transformers skips the MTP layer on load, so whatever it saved has lost it while the config still names it.
        # Serving without it is fine but slower, so it must be said, not assumed.
        raise CheckpointError(
            f"{folder}: num_nextn_predict_layers is 1 but no tensor {mtp}* exists (lost in a conversion?); "
            "restore the MTP layer, or set num_nextn_predict_layers to 0 in config.json to serve without it"
        )
    if missing:
        raise CheckpointError(f"{folder}: tensors that config.json asks for are missing: {_few(missing)}")
    extra = [name for name in entries if name not in expected]
    if extra:
        where = entries[extra[0]].file
        raise CheckpointError(f"{where}: tensors that config.json has no place for: {_few(extra)}")
    for name, spec in expected.items():
        entry = entries[name]
        if entry.shape != spec.shape or entry.dtype != spec.dtype:
            raise CheckpointError(
                f"{entry.file}: tensor {name} is {entry.dtype} {list(entry.shape)}; "
                f"config.json asks for {spec.dtype} {list(spec.shape)}"
            )


def _few(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 3} more ({len(names)} in all)" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _read_slice(fd: int, entry: TensorEntry, rows: slice | None, columns: slice | None) -> torch.Tensor:
    row_range = _range(entry, 0, rows)
    shape = entry.shape if row_range is None else (len(row_range), *entry.shape[1:])
    column_range = _range(entry, 1, columns)
    item = ITEM_BYTES[entry.dtype]
    first = row_range.start if row_range else 0
    row_bytes = item
    for width in entry.shape[1:]:
        row_bytes *= width
    start = entry.offset + first * row_bytes
    if column_range is None or len(column_range) == entry.shape[1]:
        data = _allocate(shape, item)
        _read_into(fd, entry, data, start)
    else:
        width = row_bytes // entry.shape[1]  # bytes of one column of one row; dimensions past the second stay whole
        shape = (shape[0], len(column_range), *shape[2:])
        data = _allocate(shape, item)
        _read_columns(
            fd, entry, data.view(shape[0], len(column_range) * width), start, column_range.start * width, row_bytes
        )
    return data.view(TORCH_DTYPES[entry.dtype]).view(shape)


def _range(entry: TensorEntry, dim: int, part: slice | None) -> range | None:
    """The indices of a slice along one dimension, None for all of a tensor without slices."""
    if part is None:
        return None
    if len(entry.shape) <= dim:
        raise ValueError(f"{entry.name} has shape {list(entry.shape)}; it has no dimension {dim} to slice")
    size = entry.shape[dim]
    start, stop = part.start or 0, size if part.stop is None else part.stop
    if part.step not in (None, 1) or not 0 <= start <= stop <= size:
        raise ValueError(f"{entry.name}: slice {part} of dimension {dim} (size {size}) is not a range within it")
    return range(start, stop)


def _allocate(shape: tuple[int, ...], item_bytes: int) -> torch.Tensor:
    nbytes = item_bytes
    for width in shape:
        nbytes *= width
    return torch.empty(nbytes, dtype=torch.uint8)


def _read_columns(fd: int, entry: TensorEntry, data: torch.Tensor, start: int, skip: int, row_bytes: int) -> None:
    """Fill data [rows, wanted bytes] with bytes skip.. of each row of row_bytes bytes, the first at `start`."""
    count, wanted = data.shape
    if row_bytes - wanted >= _PAGE_BYTES:
        for row in range(count):
            _read_into(fd, entry, data[row], start + row * row_bytes + skip)
        return
    block = max(1, _BLOCK_BYTES // row_bytes)
    scratch = torch.empty((min(block, count), row_bytes), dtype=torch.uint8)
    for row in range(0, count, block):
        part = scratch[: min(block, count - row)]
        _read_into(fd, entry, part.view(-1), start + row * row_bytes)
        data[row : row + block] = part[:, skip : skip + wanted]


def _read_into(fd: int, entry: TensorEntry, data: torch.Tensor, offset: int) -> None:
    """Fill the flat byte tensor from the file."""
    view = memoryview(data.numpy())  # type: ignore[arg-type]
    done = 0
    while done < len(view):
        try:
            got = os.preadv(fd, [view[done : done + _READ_BYTES]], offset + done)
        except OSError as exc:
            raise CheckpointError(f"{entry.file}: reading tensor {entry.name} failed: {exc.strerror}") from None
        if got == 0:
            raise CheckpointError(
                f"{entry.file} ends inside tensor {entry.name} (byte {offset + done}): it was cut after opening"
            )
        done += got
