"""The service as a Spark runs it, on three loopback addresses: real supervisors, real engines, a real client."""

import os
import signal
import sys
import time
from pathlib import Path

import openai
import pytest
from supervised import Supervised

from tfglm.checkpoint.synth import write_checkpoint

pytest.importorskip("torch.distributed")


def ask(client: openai.OpenAI) -> str:
    reply = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "What comes after three?"}],
        max_tokens=12,
        temperature=0,
        extra_body={"reasoning_effort": "none", "ignore_eos": True},
    )
    return reply.choices[0].message.content or ""


def test_a_killed_engine_interrupts_the_service_and_no_more(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoint", "tiny", 1)
    settings = {"drafter": "none", "threads": 1, "context": 512, "parallel": 1, "wire": "gloo", "served_name": "tiny"}
    command = [sys.executable, "-m", "tfglm.cli.main"]
    limits = {"dead": 5, "start": 240, "plan": 120}
    with Supervised(tmp_path, command=command, settings=settings, limits=limits) as three:
        three.start()
        three.until_serving(1, 240)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{three.port}/v1", api_key="none", max_retries=0, timeout=120)
        before = ask(client)
        engines = [three.engine(rank) for rank in range(3)]
        os.kill(three.engine(2), signal.SIGKILL)
        began = time.monotonic()
        three.until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in engines), 10, "all engines have ended")
        down = time.monotonic() - began
        three.until_serving(2, 240)
        print(f"all engines ended after {down:.1f} s, serving again after {time.monotonic() - began:.1f} s")
        assert ask(client) == before
        assert three.state(0)["tok_s"] >= 0
        three.signal(0, signal.SIGTERM)
        assert three.ended(0) == 0
