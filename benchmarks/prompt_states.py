"""What prompt states cost and save: pages on a disk beside a plain file copy, resumed prompts beside fresh ones.

    PYTHONPATH=. python benchmarks/prompt_states.py --folder /path/on/a/fast/disk --out FILE.json

The state is one rank's of three of a 94,317-token prompt of GLM-5.3 in fp4, 1.23 GB in 123 pages of random bytes; it
travels between the disk and the planes of all layers as it does under the engine. Files leave the page cache after each
step, so reads come from the disk. The prompts are read by a synthetic model. With --device cuda the planes and that
model are on a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tfglm.cache.disk import PageStore
from tfglm.cache.kept import KeptStates
from tfglm.cache.latent import LayerPlanes
from tfglm.cache.pages import PAGE, PagePool, Stream, pages_for
from tfglm.cache.sizes import layer_bytes
from tfglm.cache.tier import DiskTier, Fetch, PageLateError, Pages
from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.engine.api import Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.engine import Engine
from tfglm.engine.keep import prompt_states
from tfglm.engine.tokenizer import Tokenizer
from tfglm.memory.inventory import published
from tfglm.models.glm53 import Glm53
from tfglm.models.load import load_model
from tfglm.settings import Settings

TOKENS, RANKS, KV = 94317, 3, "fp4"
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        result = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
            "load_average": os.getloadavg()[0],
            "disk": disk(Path(folder), args.repeats, args.device),
            "prompts": prompts(Path(folder), args.device),
        }
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


# ---- the disk


def disk(folder: Path, repeats: int, device: str) -> dict[str, Any]:
    """GB/s of every step, the median of some repeats, and seconds of the whole state."""
    planes = full_planes(device)
    pages = Pages(planes)
    count = planes[0].latent.shape[0]
    for plane in (plane for layer in planes for plane in (layer.latent, layer.rope, layer.index) if plane is not None):
        plane.random_(256)
    total = count * pages.nbytes
    steps: dict[str, list[float]] = {}
    for repeat in range(repeats):
        for name, seconds in one_round(folder / str(repeat), planes, pages, count).items():
            steps.setdefault(name, []).append(seconds)
        shutil.rmtree(folder / str(repeat))
    medians = {name: statistics.median(seconds) for name, seconds in steps.items()}
    return {
        "bytes": total,
        "pages": count,
        "seconds": {name: round(seconds, 3) for name, seconds in medians.items()},
        "GB_per_s": {name: round(total / GB / seconds, 3) for name, seconds in medians.items()},
    }


def full_planes(device: str) -> list[LayerPlanes]:
    config = published("full").config
    row, count = layer_bytes(config, KV), pages_for(-(-TOKENS // RANKS))

    def plane(width: int) -> torch.Tensor:
        return torch.empty(count, PAGE, width, dtype=torch.uint8, device=device)

    return [
        LayerPlanes(plane(row.latent), plane(row.rotary), plane(row.index) if kind == "full" else None)
        for kind in config.indexer_types
    ]


def one_round(folder: Path, planes: list[LayerPlanes], pages: Pages, count: int) -> dict[str, float]:
    folder.mkdir()
    steps = plain(folder, pages, count)
    pool = PagePool(count)
    kept = KeptStates(pool, count)
    store = PageStore(folder / "pages", bytes(32), pages.nbytes, limit=1 << 50, keep_free=0)
    tier = DiskTier(kept, pages, store)
    stream = Stream(pool)
    stream.pages, stream.length = pool.take(count), count * PAGE
    keys = kept.keys(range(count * PAGE))

    def write() -> None:
        kept.keep(stream, keys)
        while len(list((folder / "pages").glob("*.page"))) < count:
            time.sleep(0.005)

    expected = pages.read(stream.pages[-1])
    steps["tier write"] = timed(write)

    def read() -> None:
        fetch = tier.fetch(keys)
        assert fetch is not None
        for page in stream.pages:
            while (data := _next(fetch)) is None:
                pass
            pages.write(page, data)
            fetch.taken()

    for plane in planes:
        plane.latent.zero_()
    steps["tier read"] = timed(read)
    assert pages.read(stream.pages[-1]) == expected
    tier.close()
    return steps


def _next(fetch: Fetch) -> bytearray | None:
    """None while the page is late."""
    try:
        page = fetch.next()
    except PageLateError:
        return None
    assert page is not None, "a page that was written is not there"
    return page


def plain(folder: Path, pages: Pages, count: int) -> dict[str, float]:
    """One file of the same size: a copy of it that is on the disk, and a read of it from there."""
    source, target = folder / "source", folder / "copy"
    with source.open("wb") as file:
        for page in range(count):
            file.write(pages.read(page))
        file.flush()
        os.fsync(file.fileno())

    def copy() -> None:
        shutil.copyfile(source, target)
        fd = os.open(target, os.O_RDWR)
        os.fsync(fd)
        os.close(fd)

    seconds = {"plain copy": timed(copy)}
    forget(target)
    buffer = bytearray(16 << 20)

    def read() -> None:
        with target.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    seconds["plain read"] = timed(read)
    source.unlink()
    target.unlink()
    return seconds


def forget(file: Path) -> None:
    """Drop a file from the page cache."""
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


# ---- prompts


def prompts(folder: Path, device: str) -> dict[str, Any]:
    """Milliseconds to the first token of one long prompt: fresh, from memory, from the disk after a restart."""
    write_checkpoint(folder / "tiny", "tiny", 0)
    settings = Settings(
        context=8192, parallel=1, prefill_rows=256, disk_cache=str(folder / "cache"), disk_keep_free_gib=0
    )
    with Checkpoint.open(folder / "tiny") as checkpoint:
        model = load_model(checkpoint, tokens=3 * 8192, device=device)
        tokenizer = Tokenizer.from_folder(folder / "tiny")
        text = tokenizer.encode("What is read once need not be read again. " * 1000)[:8000]
        wanted = GenerationRequest("a", text, SamplingParams(seed=1), max_tokens=16, ignore_eos=True)
        rows = []
        with engine_over(folder, model, tokenizer, settings) as engine:
            rows += [ask(engine, wanted), ask(engine, replace(wanted, id="b"))]
        with engine_over(folder, model, tokenizer, settings) as engine:
            rows.append(ask(engine, wanted))
    assert rows[0][1] == rows[1][1] == rows[2][1], "a resumed reply differs from the fresh one"
    named = dict(zip(("fresh", "from memory", "from disk"), rows, strict=True))
    return {
        "tokens": len(text),
        "first_token_ms": {name: round(end.timings.first_token_ms, 1) for name, (end, _) in named.items()},
        "cached_tokens": {name: end.usage.cached_tokens for name, (end, _) in named.items()},
    }


@contextmanager
def engine_over(folder: Path, model: Glm53, tokenizer: Tokenizer, settings: Settings) -> Iterator[Engine]:
    free = model.cache.pool.free
    states = prompt_states(folder / "tiny", model, free // 2, settings)
    engine = Engine(model, tokenizer, settings, [0], states=states)
    engine.start()
    yield engine
    assert engine.wait_idle(60) and engine.stop(60)
    states.drop(free)


def ask(engine: Engine, wanted: GenerationRequest) -> tuple[Finished, list[int]]:
    ended, events = threading.Event(), list[Event]()

    def receive(event: Event) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed):
            ended.set()

    engine.submit(wanted, receive)
    assert ended.wait(600) and isinstance(events[-1], Finished), events[-1]
    tokens = [token for event in events for token in getattr(event, "token_ids", ())]
    return events[-1], tokens


if __name__ == "__main__":
    main()
