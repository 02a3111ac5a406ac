"""Loading, first token, decoding and HTTP cost on a CPU, beside transformers' own generate on the same checkpoint.

    python benchmarks/serve_cpu.py --out benchmarks/results/serve_cpu.json

Each phase runs in a process of its own, so that peak memory belongs to it; figures are medians of `--repeats` runs.
All of them, transformers' too, run with GOMP_SPINCOUNT=3000, which `tfglm` sets by itself: without it any other busy
process makes either side ten times slower.
Needs the dev extra (transformers). Random weights: the figures say nothing about the quality of replies.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROMPT_TOKENS = 1000
REPLY_TOKENS = 128
CLIENTS = 16
PACE_S = 0.005
"""Between two tokens of the paced engine that stands in for the model when the server's own cost is measured."""


def prompt_of(number: int, tokens: int = PROMPT_TOKENS) -> list[int]:
    """Token ids that begin unlike those of every other number, so that no kept prompt state can help."""
    return [5 + (number * 131 + i * 7) % 1000 for i in range(tokens)]


def peak_rss() -> int:
    """Bytes of the largest resident set this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status: this benchmark needs Linux")


# ---- phases: each prints one JSON object


def phase_interpreter(_: Path, __: str) -> dict[str, Any]:
    """What a process weighs that has imported everything, multiplied once, and holds no model."""
    import torch

    import tfglm.engine.engine
    import tfglm.models.load  # noqa: F401

    torch.randn(512, 512) @ torch.randn(512, 512)
    return {"peak_rss": peak_rss()}


def phase_load(path: Path, _: str) -> dict[str, Any]:
    from tfglm.checkpoint.store import Checkpoint
    from tfglm.models.load import load_model

    start = time.perf_counter()
    with Checkpoint.open(path) as checkpoint:
        load_model(checkpoint, tokens=4096)
        return {"seconds": time.perf_counter() - start, "peak_rss": peak_rss(), "checkpoint_bytes": checkpoint.nbytes}


def phase_engine(path: Path, _: str) -> dict[str, Any]:
    """The engine alone, no HTTP."""
    from tfglm.checkpoint.store import Checkpoint
    from tfglm.engine.api import Finished, GenerationRequest, SamplingParams
    from tfglm.engine.engine import Engine
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.models.load import load_model
    from tfglm.settings import Settings

    # In a thread that ends, as `tfglm serve` does: OpenMP workers that a living thread has left behind are too many
    # for the processors, and libgomp then lets nobody spin.
    with Checkpoint.open(path) as checkpoint, ThreadPoolExecutor(1) as loading:
        model = loading.submit(load_model, checkpoint, tokens=8192).result()
    engine = Engine(model, Tokenizer.from_folder(path), Settings(), ())
    engine.start()

    def run(number: int, prompt: list[int], tokens: int) -> Finished:
        events: queue.SimpleQueue[object] = queue.SimpleQueue()
        greedy = SamplingParams(temperature=0.0)
        engine.submit(GenerationRequest(str(number), prompt, greedy, tokens, ignore_eos=True), events.put)
        while not isinstance(event := events.get(), Finished):
            pass
        return event

    run(0, prompt_of(0), 4)
    timings = run(1, prompt_of(1), REPLY_TOKENS).timings
    engine.stop()
    return {
        "ttft_ms": timings.first_token_ms,
        "decode_tok_s": (REPLY_TOKENS - 1) / timings.predicted_ms * 1e3,
    }


def phase_paced_server(path: Path, _: str) -> dict[str, Any]:
    """A server whose engine emits a token every PACE_S; the token's text is the moment it was emitted."""
    from tfglm.engine.api import Delta, Finished, GenerationRequest, Snapshot, Started, Timings, Usage
    from tfglm.engine.tokenizer import Tokenizer
    from tfglm.server.info import ModelInfo
    from tfglm.server.run import bind, serve
    from tfglm.server.state import Served
    from tfglm.server.template import ChatTemplate
    from tfglm.settings import Settings

    class PacedEngine:
        def submit(self, request: GenerationRequest, on_event: Callable[[Any], None]) -> None:
            def emit() -> None:
                on_event(Started(0.0))
                for token in range(request.max_tokens):
                    time.sleep(PACE_S)
                    on_event(Delta("answer", f"{time.perf_counter_ns()} ", (token,)))
                on_event(Finished("length", None, Usage(1, request.max_tokens, 0), Timings(0, 0, 0, 0)))

            threading.Thread(target=emit, daemon=True).start()

        def cancel(self, request_id: str) -> None:
            del request_id

        def drain(self) -> None:
            return

        def snapshot(self) -> Snapshot:
            return Snapshot("ready", 0, 0, 0.0, 8192, 0, 8192, 0, 0, 0, 0)

    def load() -> Served:
        return Served(
            PacedEngine(), Tokenizer.from_folder(path), ChatTemplate.from_folder(path), ModelInfo("paced", 8192)
        )

    settings = Settings(port=0)
    serve(bind(settings), settings, load, lambda served, url: print(f"at {url}/v1", flush=True))
    return {}


def phase_transformers_load(path: Path, dtype: str) -> dict[str, Any]:
    return _load_transformers(path, dtype)[1]


def _load_transformers(path: Path, dtype: str) -> tuple[Any, dict[str, Any]]:
    import torch
    from transformers import GlmMoeDsaForCausalLM

    torch.randn(512, 512) @ torch.randn(512, 512)
    base = peak_rss()
    start = time.perf_counter()
    model = GlmMoeDsaForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype), attn_implementation="eager")
    figures = {"seconds": time.perf_counter() - start, "interpreter_peak_rss": base, "peak_rss": peak_rss()}
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return model, figures | {"rss_over_checkpoint": (figures["peak_rss"] - base) / size}


def phase_transformers(path: Path, dtype: str) -> dict[str, Any]:
    """Its own generate; one-token requests one after the other and as one batch, for it has no server."""
    import torch

    model = _load_transformers(path, dtype)[0]
    prompt = torch.tensor([prompt_of(1)])

    def generate(ids: torch.Tensor, tokens: int) -> float:
        start = time.perf_counter()
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        model.generate(ids, attention_mask=torch.ones_like(ids), **limits)
        return time.perf_counter() - start

    with torch.inference_mode():
        generate(torch.tensor([prompt_of(0)]), 4)
        first = generate(prompt, 1)
        whole = generate(prompt, REPLY_TOKENS)
        short = prompt[:, :20]
        one_by_one = sum(generate(short, 1) for _ in range(CLIENTS))
        together = generate(short.repeat(CLIENTS, 1), 1)
    return {
        "ttft_ms": first * 1e3,
        "decode_tok_s": (REPLY_TOKENS - 1) / (whole - first),
        "one_token_requests_s": {"one_by_one": CLIENTS / one_by_one, "batch_of_16": CLIENTS / together},
    }


# ---- clients


class ServerProcess:
    """A server in a process of its own; `port` once it has said that it is ready."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "/v1" not in line:
            raise RuntimeError(f"the server said {line!r} instead of its address")
        self.port = int(line.split("/v1")[0].rsplit(":", 1)[1])

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def post(self, body: dict[str, Any], path: str = "/v1/chat/completions") -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(response.read().decode())
        return response


def stream(server: ServerProcess, body: dict[str, Any], path: str) -> list[tuple[int, dict[str, Any]]]:
    """Every chunk of a streamed reply with the moment it was read, in nanoseconds."""
    chunks = []
    response = server.post(body | {"stream": True}, path)
    while line := response.readline():
        now = time.perf_counter_ns()
        if line.startswith(b"data: {"):
            chunks.append((now, json.loads(line[6:])))
    return chunks


def measure_overhead(server: ServerProcess) -> dict[str, float]:
    """Milliseconds from the engine's callback to the parsed line at a client in another process."""
    body = {"model": "paced", "messages": [{"role": "user", "content": "x"}], "max_tokens": 400}
    late = []
    for now, chunk in stream(server, body, "/v1/chat/completions"):
        delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
        for stamp in (delta.get("content") or delta.get("reasoning_content") or "").split():
            late.append((now - int(stamp)) / 1e6)
    return {"median_ms": statistics.median(late), "p99_ms": sorted(late)[int(len(late) * 0.99)], "tokens": len(late)}


def measure_served(server: ServerProcess, number: int) -> dict[str, float]:
    body = {"model": "tiny", "max_tokens": REPLY_TOKENS, "temperature": 0, "ignore_eos": True}
    stream(server, body | {"prompt": prompt_of(2 * number), "max_tokens": 4}, "/v1/completions")
    body["prompt"] = prompt_of(2 * number + 1)
    start = time.perf_counter_ns()
    moments = [now for now, chunk in stream(server, body, "/v1/completions") if chunk["choices"][0]["text"]]
    one = {"model": "tiny", "prompt": prompt_of(0, 20), "max_tokens": 1, "temperature": 0}

    def client(count: int) -> None:
        for _ in range(count):
            server.post(one, "/v1/completions").read()

    rounds = 8
    began = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, [rounds] * CLIENTS))
    return {
        "ttft_ms": (moments[0] - start) / 1e6,
        "decode_tok_s": (REPLY_TOKENS - 1) / ((moments[-1] - moments[0]) / 1e9),
        "one_token_requests_s": rounds * CLIENTS / (time.perf_counter() - began),
    }


# ---- the run


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        key: medians([run[key] for run in runs])
        if isinstance(runs[0][key], dict)
        else statistics.median(run[key] for run in runs)
        for key in runs[0]
    }


def child(phase: str, path: Path, *more: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--phase", phase, "--checkpoint", str(path), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    if done.returncode:
        raise RuntimeError(f"phase {phase} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def load_figures(path: Path, repeats: int, interpreter: int) -> dict[str, Any]:
    figures = medians([child("load", path) for _ in range(repeats)])
    figures["rss_over_checkpoint"] = (figures["peak_rss"] - interpreter) / figures["checkpoint_bytes"]
    return figures


def whole_run(repeats: int, folder: Path) -> dict[str, Any]:
    paths = {preset: folder / preset for preset in ("tiny", "small")}
    for preset, path in paths.items():
        subprocess.run([sys.executable, "-m", "tfglm.cli.main", "synth", str(path), "--preset", preset], check=True)
    tiny = paths["tiny"]
    interpreter = medians([child("interpreter", tiny) for _ in range(repeats)])["peak_rss"]
    result: dict[str, Any] = {"hardware": hardware(), "repeats": repeats, "interpreter_peak_rss": interpreter}
    result["load"] = {preset: load_figures(path, repeats, interpreter) for preset, path in paths.items()}
    result["engine_alone"] = medians([child("engine", tiny) for _ in range(repeats)])
    server = ServerProcess("-m", "tfglm.cli.main", "serve", str(tiny), "--port", "0", "--log-level", "error")
    result["served"] = medians([measure_served(server, number) for number in range(repeats)])
    server.close()
    paced = ServerProcess(__file__, "--phase", "paced-server", "--checkpoint", str(tiny))
    result["server_overhead_per_token"] = medians([measure_overhead(paced) for _ in range(repeats)])
    paced.close()
    result["transformers"] = {
        dtype: {
            "load": {
                preset: medians([child("transformers-load", path, "--dtype", dtype) for _ in range(repeats)])
                for preset, path in paths.items()
            },
            "generate": medians([child("transformers", tiny, "--dtype", dtype) for _ in range(repeats)]),
        }
        for dtype in ("float32", "bfloat16")
    }
    return result


def hardware() -> dict[str, Any]:
    import torch
    import transformers

    model = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent)
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


PHASES: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "interpreter": phase_interpreter,
    "load": phase_load,
    "engine": phase_engine,
    "paced-server": phase_paced_server,
    "transformers-load": phase_transformers_load,
    "transformers": phase_transformers,
}


def main() -> None:
    os.environ["GOMP_SPINCOUNT"] = "3000"  # for the children; this process never imports torch before them
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--phase", choices=list(PHASES), help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dtype", default="float32", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.phase:
        print(json.dumps(PHASES[args.phase](args.checkpoint, args.dtype)))
    else:
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(whole_run(args.repeats, Path(folder)), indent=2)
        print(text)
        if args.out:
            args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
