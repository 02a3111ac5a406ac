"""`tfglm serve` refuses what cannot work: one line with a code, before anything is loaded; --verbose shows where."""

from __future__ import annotations

import json
import shutil
import signal
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import ServerProcess

from tfglm.checkpoint.vocabulary import build_tokenizer
from tfglm.cli.main import main
from tfglm.server.run import bind
from tfglm.settings import Settings


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "tiny")


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """The one line that `tfglm serve` ends with."""
    assert main(["serve", *map(str, args)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    return line


def cut_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def more_tokens_than_rows(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(build_tokenizer(1600).to_str(pretty=False))


def no_markup_tokens(folder: Path) -> None:
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer | {"added_tokens": []}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_config, ["E_CONFIG", "config.json is not JSON"]),
        (more_tokens_than_rows, ["E_CHECKPOINT", "tokenizer.json has 1636 tokens", "vocab_size", "1536"]),
        (no_markup_tokens, ["E_CHECKPOINT", "tokenizer.json has 1476 tokens", "eos_token_id", "1485"]),
        (no_tokenizer, ["E_CHECKPOINT", "tokenizer.json is missing"]),
    ],
)
def test_a_checkpoint_that_cannot_be_served(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], words: list[str]
) -> None:
    damage(folder)
    line = refusal(capsys, folder, "--port", 0)
    assert line.startswith(f"tfglm: {words[0]}: ") and all(word in line for word in words), line


def test_no_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, tmp_path / "none", "--port", 0).startswith("tfglm: E_CHECKPOINT: ")


def test_a_setting_out_of_range(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refusal(capsys, folder, "--parallel", 9)
    assert line.startswith("tfglm: E_CONFIG: --parallel is '9'; it takes 1 to 8")


@pytest.mark.parametrize("name", ["n\udcff", "two\nlines"])
def test_a_name_that_no_reply_could_carry(folder: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    line = refusal(capsys, folder, "--port", 0, "--served-name", name)
    assert line.startswith("tfglm: E_CONFIG: the model's name in the API would be ") and ascii(name) in line


def test_a_port_in_use(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = bind(Settings(port=0))
    try:
        assert "tfglm: E_PORT: " in refusal(capsys, folder, "--port", taken.url.rpartition(":")[2])
    finally:
        taken.close()


BUSY = """
import torch
from tfglm.cli.main import entry
from tfglm.models import load

def load_model(*args, **fields):
    matrix = torch.ones(1500, 1500)
    print("loading", flush=True)
    while True:
        matrix = matrix @ matrix

load.load_model = load_model
entry()
"""


def test_a_signal_while_loading_is_an_orderly_end(folder: Path) -> None:
    """The thread that loads cannot be stopped in the middle of a product; the process ends all the same."""
    flags = ("--port", "0", "--threads", "1", "--context", "9000", "--parallel", "1")
    with ServerProcess("-c", BUSY, "serve", folder, *flags) as server:
        server.wait_for("(W_CONTEXT: --context is 9000; the model was made for 8192)")
        server.wait_for("(loading)")
        server.send(signal.SIGTERM)
        assert server.ended() == 0
        assert not any("terminate called" in line for line in server.lines)


def test_stdout_that_nobody_reads_is_no_reason_to_stop(folder: Path) -> None:
    """The line with the address cannot be written; requests are served all the same, and the end is in order."""
    port = bind(Settings(port=0))
    url = port.url
    port.close()
    flags = ("--port", url.rpartition(":")[2], "--threads", "1", "--context", "256", "--parallel", "1")
    script = "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); from tfglm.cli.main import entry; entry()"
    with ServerProcess("-c", script, "serve", folder, *flags) as server:
        server.wait_for("stdout cannot be written (.*)")
        with urllib.request.urlopen(url + "/v1/models", timeout=30) as response:
            assert response.status == 200
        server.send(signal.SIGTERM)
        assert server.ended() == 0
        assert not any("Traceback" in line or "Exception" in line for line in server.lines), server.lines


def test_verbose_shows_the_traceback(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="E_CHECKPOINT"):
        main(["--verbose", "serve", str(tmp_path / "none"), "--port", "0"])


def test_a_window_that_nobody_asked_for_is_kept_for_the_next_start(checkpoint: Path, tmp_path: Path) -> None:
    """Free memory differs from start to start; the window that clients have learnt does not."""
    flags = ("--port", "0", "--threads", "1", "--parallel", "1")

    def window(*more: str) -> int:
        environ = {"XDG_STATE_HOME": str(tmp_path)}
        with ServerProcess("-m", "tfglm.cli.main", "serve", checkpoint, *flags, *more, environ=environ) as server:
            return int(server.wait_for(r"window (\d+) tokens"))

    assert window() == 8192
    kept = tmp_path / "tfglm" / "windows.json"
    [key] = json.loads(kept.read_text())
    kept.write_text(json.dumps({key: 2048}))
    assert window() == 2048
    assert window("--kept-gib", "0.5") == 8192  # other settings, another window
    assert window("--context", "1024") == 1024
