"""One model in several processes: the real server, OpenAI's client, and what becomes of both when a rank is lost."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from processes import DEVICE, ServerProcess

from tfglm.checkpoint.config import GenerationDefaults
from tfglm.checkpoint.store import Checkpoint
from tfglm.engine.api import Delta, Event, Failed, Finished, GenerationRequest, SamplingParams
from tfglm.engine.engine import Engine
from tfglm.engine.tokenizer import Tokenizer
from tfglm.settings import Settings

sys.path.append(str(Path(__file__).parents[1] / "ranks"))
from threaded_ranks import spread

SERVE = ("-m", "tfglm.cli.main", "serve")
SMALL = ("--port", "0", "--threads", "1", "--context", "4096", "--parallel", "1", "--kept-gib", "0")
END_S = 25.0
"""That a cluster which lost a rank may take to end here: 10 on machines with a core a rank (5 until a silent rank is
missed, 1 until that is looked at, 4 for last words), and as much again on a busy one."""
TEXT = "The sea is wide and the boats are small. " * 100

two_gpus = pytest.mark.skipif(
    DEVICE["TFGLM_DEVICE"] != "cuda" or torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two ranks"
)
on_cpu = pytest.mark.skipif(DEVICE["TFGLM_DEVICE"] != "cpu", reason="compares with ranks on a CPU")


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)


def complete(url: str, **fields: Any) -> Any:
    with client_of(url) as client:
        return client.completions.create(model="tiny", **fields)


def ranks_of(server: ServerProcess) -> dict[int, int]:
    """The process of every rank but 0."""
    found = {}
    tasks = Path(f"/proc/{server.process.pid}/task")
    children: set[str] = set()
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # a thread may end while it is looked at
            children.update((task / "children").read_text().split())
    for pid in children:
        environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        for entry in environ:
            if entry.startswith(b"TFGLM_RANK="):
                found[int(entry.partition(b"=")[2])] = int(pid)
    return found


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether processes end in time; one whose end nobody has asked for yet counts as ended."""
    deadline = time.monotonic() + seconds
    left = set(pids)
    while left and time.monotonic() < deadline:
        left = {pid for pid in left if running(pid)}
        time.sleep(0.05)
    return not left


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def serving(server: ServerProcess) -> str:
    return server.wait_for(r"(http://[\d.]+:\d+)")


def health(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url + "/health", timeout=10) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        return json.load(error)


# ---- replies


class Reply:
    """A reply of an engine of this process."""

    def __init__(self, engine: Engine, prompt: list[int], sampling: SamplingParams, tokens: int) -> None:
        self._parts: list[str] = []
        self._ended = threading.Event()
        request = GenerationRequest("r", prompt, sampling, tokens, ignore_eos=True, split_reasoning=False)
        engine.submit(request, self._take)
        assert self._ended.wait(120)

    def _take(self, event: Event) -> None:
        if isinstance(event, Delta):
            self._parts.append(event.text)
        if isinstance(event, Finished | Failed):
            assert isinstance(event, Finished), event
            self._ended.set()

    @property
    def text(self) -> str:
        return "".join(self._parts)


@on_cpu
def test_a_served_reply_is_that_of_ranks_in_one_process(checkpoint: Path) -> None:
    samplings = [{"temperature": 0.0}, {"temperature": 1.0, "top_p": 0.95, "seed": 7}]
    common = {"max_tokens": 60, "extra_body": {"ignore_eos": True}}
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", *SMALL) as server:
        url = serving(server)
        assert health(url)["ranks"] == ["ready"] * 3
        with urllib.request.urlopen(url + "/metrics", timeout=10) as page:
            assert b'tfglm:ranks{model_name="tiny"} 3.0' in page.read()
        pids = list(ranks_of(server).values())
        served = [complete(url, prompt=TEXT[:500], **common, **sampling).choices[0].text for sampling in samplings]
        server.send(signal.SIGTERM)
        assert server.ended() == 0
        assert gone(pids), server.lines
    tokenizer = Tokenizer.from_folder(checkpoint)
    defaults = GenerationDefaults.from_file(checkpoint / "generation_config.json")
    with Checkpoint.open(checkpoint) as opened, spread(opened, 3, tokens=4096) as [model, *_]:
        engine = Engine(model, tokenizer, Settings(threads=1, parallel=1), opened.config.eos_token_ids)
        engine.start()
        base = {"top_p": defaults.top_p, "top_k": defaults.top_k, "min_p": defaults.min_p}
        replies = [
            Reply(engine, tokenizer.encode(TEXT[:500]), SamplingParams(**{**base, **sampling}), 60).text
            for sampling in samplings
        ]
        engine.stop()
    assert served == replies
    assert len(set(served)) == 2


@two_gpus
@pytest.mark.parametrize("cp", ["0", "1"])
def test_ranks_with_a_gpu_each_reply_over_nccl_as_through_host_memory(cp: str, checkpoint: Path) -> None:
    """The same sums in the same order, here in captured windows and there launched; and both end in order."""
    replies = {}
    samplings = [{"temperature": 0.0}, {"temperature": 1.0, "seed": 7}]
    for asked, wire in (("auto", "nccl"), ("shared", "shared")):
        with ServerProcess(*SERVE, checkpoint, "--ranks", "2", *SMALL, "--wire", asked, "--cp", cp) as server:
            server.wait_for(f"(tensors travel through {wire})")
            if wire == "nccl":
                assert server.wait_for(r"rank 0 .*: model: (\d+) windows captured") == "16"
                assert server.wait_for(r"rank 0 .*: MTP layer: (\d+) windows captured") == "16"
            url, pids = serving(server), list(ranks_of(server).values())
            for draft in (True, False):
                fields = {"prompt": TEXT[:500], "max_tokens": 80, "extra_body": {"ignore_eos": True, "draft": draft}}
                replies[wire, draft] = [complete(url, **fields, **how).choices[0].text for how in samplings]
            server.send(signal.SIGTERM)
            assert server.ended() == 0, server.lines
            assert gone(pids), server.lines
        assert not any("still in use" in line for line in server.lines), server.lines
    assert len({tuple(both) for both in replies.values()}) == 1, replies


@on_cpu
def test_ranks_on_machines_of_their_own(checkpoint: Path) -> None:
    """Each started by itself, over gloo; a follower that is there first waits for its leader."""
    common = ("-m", "tfglm.cli.main", "engine", checkpoint, "--ranks", "2", "--leader", f"127.0.0.1:{free_port()}")
    with ServerProcess(*common, "--rank", "1", *SMALL) as follower:
        with ServerProcess(*common, "--rank", "0", *SMALL) as leader:
            url = serving(leader)
            first, second = (complete(url, prompt=TEXT[:300], max_tokens=20, temperature=0) for _ in range(2))
            assert first.choices[0].text == second.choices[0].text
            leader.send(signal.SIGTERM)
            assert leader.ended() == 0
        assert follower.ended() == 0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@on_cpu
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--kv", "fp32"), "field 'settings.kv' is 'bf16' on rank 0 and 'fp32' on rank 1"),
        (("--threads", "2"), "field 'machine.threads' is 1 on rank 0 and 2 on rank 1"),
    ],
)
def test_other_settings_on_one_rank(checkpoint: Path, flags: tuple[str, ...], words: str) -> None:
    common = ("-m", "tfglm.cli.main", "engine", checkpoint, "--ranks", "2", "--leader", f"127.0.0.1:{free_port()}")
    leader = ServerProcess(*common, "--rank", "0", *SMALL)
    follower = ServerProcess(*common, "--rank", "1", *SMALL, *flags)
    with leader, follower:
        assert follower.ended(60) == 1
        assert leader.ended(60) == 1
    for process in (leader, follower):
        assert any(line.startswith("tfglm: E_RANKS: ") and words in line for line in process.lines), process.lines


def test_too_little_memory_on_the_ranks(checkpoint: Path) -> None:
    """Three ranks on one machine share what it has: the plan is refused before anything is loaded."""
    more = ("--floor-gib", "64", "--overhead-gib", "64")  # than a third of any machine or GPU that runs these tests
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", *SMALL, *more) as server:
        assert server.ended(60) == 1
    assert any("tfglm: E_MEMORY: " in line and "on rank" in line for line in server.lines), server.lines
    assert any("rank 2: tfglm: E_RANKS: rank 0 has ended: E_MEMORY" in line for line in server.lines), server.lines


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            ("serve", "--ranks", "2", "--drafter", "dspark", "--drafter-path", "/none"),
            "/none/config.json does not exist",
        ),
        (("engine", "--ranks", "2", "--rank", "2", "--leader", "localhost:1"), "ranks count from 0"),
        (("engine", "--ranks", "2", "--rank", "1"), "--leader is ''; it takes HOST:PORT"),
    ],
)
def test_what_does_not_work(checkpoint: Path, command: tuple[str, ...], words: str) -> None:
    with ServerProcess("-m", "tfglm.cli.main", command[0], checkpoint, *command[1:], *SMALL) as server:
        assert server.ended(60) == 1
    assert any("tfglm: E_CONFIG: " in line and words in line for line in server.lines), server.lines


# ---- lost ranks

SLOW = """
import time
from tfglm.checkpoint.store import Checkpoint
read = Checkpoint.read

def slowly(self, *args, **fields):
    time.sleep(0.1)
    return read(self, *args, **fields)

Checkpoint.read = slowly
"""


def assert_ended(server: ServerProcess, rank: int, began: float, others: list[int]) -> None:
    """All ranks have ended, and the last word names the one that was lost."""
    assert server.ended(END_S) != 0, server.lines
    print(f"ended {time.monotonic() - began:.1f} s after rank {rank} was lost")
    assert gone(others), server.lines
    assert any("E_RANKS" in line and f"rank {rank}" in line for line in server.lines), server.lines


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_lost_while_it_loads(checkpoint: Path, tmp_path: Path, number: int) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    port = free_port()
    flags = (*SMALL, "--port", str(port))
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", *flags, patches=tmp_path) as server:
        server.wait_for("(rank 2 .* has joined)")
        pids = ranks_of(server)
        limit = time.monotonic() + 60
        while not (now := health(f"http://127.0.0.1:{port}"))["ranks"][2].startswith("loading, "):
            assert time.monotonic() < limit and now["status"] == "loading", now
            time.sleep(0.1)
        os.kill(pids[2], number)
        began = time.monotonic()
        assert_ended(server, 2, began, [server.process.pid, pids[1]])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_a_rank_lost_while_nothing_runs(checkpoint: Path, number: int) -> None:
    with ServerProcess(*SERVE, checkpoint, "--ranks", "2", *SMALL) as server:
        serving(server)
        os.kill(ranks_of(server)[1], number)
        assert_ended(server, 1, time.monotonic(), [])


LATE = """
import os, time
if os.environ.get("TFGLM_RANK") == "2":
    time.sleep(600)
from tfglm.cli import local_ranks
local_ranks._END_S = 300.0
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_leader_that_is_stopped_while_the_ranks_meet(
    checkpoint: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Those that have joined are told, and those that have not come are not waited for."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", *SMALL, patches=tmp_path) as server:
        server.wait_for("(rank 1 .* has joined)")
        pids = list(ranks_of(server).values())
        assert len(pids) == 2
        server.send(number)
        assert server.ended(60) == 0, server.lines
        assert gone(pids)
    assert "rank 1: tfglm: E_RANKS: rank 0 was stopped before it was idle" in server.lines, server.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_stopped_while_the_ranks_meet_says_so(checkpoint: Path, number: signal.Signals) -> None:
    common = ("-m", "tfglm.cli.main", "engine", checkpoint, "--ranks", "3", "--leader", f"127.0.0.1:{free_port()}")
    with ServerProcess(*common, "--rank", "0", *SMALL) as leader:
        with ServerProcess(*common, "--rank", "1", *SMALL) as follower:
            leader.wait_for("(rank 1 .* has joined)")
            follower.send(number)
            assert follower.ended(60) == leader.ended(60) == 1
        for process in (leader, follower):
            assert f"tfglm: E_RANKS: rank 1 was stopped by {number.name}" in process.lines, process.lines


def test_ranks_end_with_a_leader_that_is_stopped_before_it_serves(checkpoint: Path) -> None:
    """While it measures what drafts cost, the others wait in a gather, where nobody comes any more."""
    with ServerProcess(*SERVE, checkpoint, "--ranks", "2", *SMALL) as server:
        server.wait_for("(rank 1 is ready)")
        pids = list(ranks_of(server).values())
        server.send(signal.SIGTERM)
        assert server.ended(60) == 0, server.lines
        assert gone(pids)
    assert any("rank 1: tfglm: E_RANKS: rank 0 was stopped" in line for line in server.lines), server.lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_rank_that_is_told_to_end_says_so_to_all(checkpoint: Path, number: signal.Signals) -> None:
    with ServerProcess(*SERVE, checkpoint, "--ranks", "2", *SMALL) as server:
        serving(server)
        os.kill(ranks_of(server)[1], number)
        assert_ended(server, 1, time.monotonic(), [])
    last_words = f"tfglm: E_RANKS: rank 1 was stopped by {number.name}"
    assert {last_words, f"rank 1: {last_words}"} <= set(server.lines), server.lines


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
@pytest.mark.parametrize("phase", ["prompt", "decode"])
def test_a_rank_lost_while_it_works(checkpoint: Path, phase: str, number: int) -> None:
    flags = ("--ranks", "3" if phase == "decode" else "2", "--prefill-rows", "16")
    with ServerProcess(*SERVE, checkpoint, *flags, *SMALL, "--copy", "0") as server:
        url = serving(server)
        pids = ranks_of(server)
        lost = max(pids)
        with client_of(url) as client:
            if phase == "decode":
                fields = {"prompt": "Once", "max_tokens": 3000, "extra_body": {"ignore_eos": True}}
                stream = client.completions.create(model="tiny", temperature=0, stream=True, **fields)
                for _, _ in zip(range(20), stream, strict=False):
                    pass
                os.kill(pids[lost], number)
                began = time.monotonic()
                with pytest.raises(openai.APIError, match=f"rank {lost}"):
                    for _ in stream:
                        pass
            else:
                timer = threading.Timer(0.3, os.kill, (pids[lost], number))
                timer.start()
                began = time.monotonic()
                with pytest.raises(openai.APIError, match=f"rank {lost}"):
                    client.completions.create(model="tiny", prompt=TEXT[:3900], max_tokens=16)
        assert_ended(server, lost, began, [pid for rank, pid in pids.items() if rank != lost])


def test_ranks_end_with_a_leader_that_is_killed(checkpoint: Path) -> None:
    with ServerProcess(*SERVE, checkpoint, "--ranks", "3", *SMALL) as server:
        serving(server)
        pids = list(ranks_of(server).values())
        assert len(pids) == 2
        server.send(signal.SIGKILL)
        assert gone(pids)


@on_cpu
def test_eight_ranks(checkpoint: Path) -> None:
    """As many as there can be, on a machine with fewer cores."""
    with ServerProcess(*SERVE, checkpoint, "--ranks", "8", *SMALL, "--copy", "0") as server:
        url = server.wait_for(r"(http://[\d.]+:\d+)", 300)
        assert health(url)["ranks"] == ["ready"] * 8
        pids = ranks_of(server)
        assert sorted(pids) == list(range(1, 8))
        first, second = (complete(url, prompt=TEXT[:300], max_tokens=8, temperature=0) for _ in range(2))
        assert first.choices[0].text == second.choices[0].text
        os.kill(pids[7], signal.SIGKILL)
        assert_ended(server, 7, time.monotonic(), list(pids.values()))
