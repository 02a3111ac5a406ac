"""`tfglm serve --disk-cache`: a server killed at once and started again resumes the prompt with the same reply."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

from processes import ServerProcess

FLAGS = ("--port", "0", "--context", "3072", "--parallel", "1", "--disk-keep-free-gib", "0", "--threads", "2")
TEXT = "A long story that is told once and remembered. 長い話。 " * 30


def start(checkpoint: Path, folder: Path) -> ServerProcess:
    return ServerProcess("-m", "tfglm.cli.main", "serve", checkpoint, *FLAGS, "--disk-cache", folder)


def say(url: str) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": TEXT}],
        "max_tokens": 24,
        "seed": 3,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def test_a_killed_server_resumes_the_prompt_with_the_same_reply(checkpoint: Path, tmp_path: Path) -> None:
    with start(checkpoint, tmp_path) as server:
        url = server.wait_for(r"(http://[\d.:]+/v1)")
        first = say(url)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        in_memory = say(url)
        cached = in_memory["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= 512 and cached % 256 == 0
        pages = tmp_path / "rank0of1"
        while len(list(pages.glob("*.page"))) < cached // 256:
            pass
        server.send(signal.SIGKILL)
        server.ended()
    with start(checkpoint, tmp_path) as server:
        url = server.wait_for(r"(http://[\d.:]+/v1)")
        resumed = say(url)
        assert resumed["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        with urllib.request.urlopen(url.replace("/v1", "/metrics"), timeout=30) as response:
            metrics = response.read().decode()
        [hits] = [line for line in metrics.splitlines() if line.startswith("vllm:prefix_cache_hits_total{")]
        assert float(hits.split()[-1]) == cached
    shas = {reply["tfglm"]["token_sha"] for reply in (first, in_memory, resumed)}
    assert len(shas) == 1
