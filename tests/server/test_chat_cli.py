"""`tfglm chat` as its own process against a server process: piped, and on a pseudo-terminal."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import HERE, ROOT, ServerProcess

from tfglm.cli.chat import Printer

COMMAND = "import sys; from tfglm.cli.main import main; sys.exit(main(sys.argv[1:]))"
ANSWER = "one two three four five"


@pytest.fixture(scope="module")
def url(checkpoint: Path) -> Iterator[str]:
    with ServerProcess(HERE / "scripted_server.py", checkpoint, "--port", "0", "--api_key", "k1,k2") as server:
        yield server.wait_for("ready (http://.*)")


@pytest.fixture
def held(checkpoint: Path) -> Iterator[ServerProcess]:
    """A server whose replies do not end before a signal."""
    flags = ("--port", "0", "--api_key", "k1,k2", "--hold")
    with ServerProcess(HERE / "scripted_server.py", checkpoint, *flags) as server:
        server.wait_for("(bound)")
        server.send(signal.SIGUSR1)
        yield server


def chat(*args: str, text: str = "", key: str = "k2") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND, "chat", *args],
        input=text,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "TFGLM_API_KEY": key},
    )


def test_piped_messages_get_answers_without_decoration(url):
    done = chat("--url", url, "--no-think", "--system", "Be brief.", text="hi\n/reset\n\n/think low\nagain\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{ANSWER}\n{ANSWER}\n", "")


def test_quit_ends(url):
    assert chat("--url", url + "/v1", text="/quit\nhi\n").stdout == ""


def test_clear_messages():
    done = chat("--url", "http://127.0.0.1:9", text="hi\n")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no server answers at http://127.0.0.1:9 (connection refused)" in done.stderr
    assert "tfglm serve" in done.stderr


def test_refusals_are_told(url):
    done = chat("--url", url, text="hi\n", key="wrong")
    assert done.returncode == 1 and "401" in done.stderr and "API key" in done.stderr
    done = chat("--url", url, "--model", "other", text="hi\n")
    assert done.returncode == 1 and "the model 'other' does not exist" in done.stderr


def test_a_reply_can_be_bounded(url):
    """The request carries the bound: the server refuses one that no request may have."""
    assert chat("--url", url, "--max-tokens", "7", text="hi\n").stdout == f"{ANSWER}\n"
    done = chat("--url", url, "--max-tokens", "-1", text="hi\n")
    assert done.returncode == 1 and "max_tokens" in done.stderr


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_reply_cannot_steer_the_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", screen := Screen())
    printer = Printer()
    printer.thinking("\x1b[31mred")
    printer.content("a\x1b]0;title\x07\n\tb\x9b2J\x7f")
    assert screen.getvalue() == "\x1b[2m␛[31mred\n\x1b[0ma␛]0;title␇\n\tb\ufffd2J\ufffd"
    assert printer.answer == "a\x1b]0;title\x07\n\tb\x9b2J\x7f"  # what the model said is what it is told


def test_a_server_that_dies_during_a_reply_is_told_from_one_that_is_not_there(held):
    url = held.wait_for("ready (http://.*)")
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "chat", "--url", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "TFGLM_API_KEY": "k1"},
    ) as process:
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.read(4) == "one "
        held.send(signal.SIGKILL)
        assert f"the server at {url} broke off in the middle of a reply" in process.communicate(timeout=60)[1]
        assert process.returncode == 1


class Terminal:
    """A chat on a pseudo-terminal."""

    def __init__(self, url: str) -> None:
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            # A test run that was started in the background ignores SIGINT, and its children would inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.chdir(ROOT)
            os.environ.update(TFGLM_API_KEY="k1", TERM="xterm", INPUTRC="/dev/null")
            os.execv(sys.executable, [sys.executable, "-c", COMMAND, "chat", "--url", url])
        self.seen = ""

    def expect(self, text: str, seconds: float = 30.0) -> str:
        """Everything up to and with `text`, which must come."""
        deadline = time.monotonic() + seconds
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{text!r} did not come: {self.seen!r}"
            try:
                self.seen += os.read(self.fd, 4096).decode()
            except OSError:
                raise AssertionError(f"ended before {text!r}: {self.seen!r}") from None
        head, _, self.seen = self.seen.partition(text)
        return head + text

    def send(self, text: str) -> None:
        os.write(self.fd, text.encode())

    def ended(self) -> int:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            ready, _, _ = select.select([self.fd], [], [], 0.05)
            if ready:
                try:
                    self.seen += os.read(self.fd, 4096).decode()
                except OSError:
                    continue
        os.kill(self.pid, signal.SIGKILL)
        raise AssertionError(f"still running: {self.seen!r}")


def test_on_a_terminal(held):
    terminal = Terminal(held.wait_for("ready (http://.*)"))
    terminal.expect("> ")
    # Ctrl-C during a reply stops the reply.
    terminal.send("hi\n")
    terminal.expect("\x1b[0mone ")
    terminal.send("\x03")
    terminal.expect("(stopped)")
    terminal.expect("> ")
    held.send(signal.SIGUSR1)
    terminal.send("again\n")
    reply = terminal.expect("tok/s)")
    assert "\x1b[2mlet me count" in reply and "\x1b[0mone two" in reply
    terminal.expect("> ")
    # Ctrl-C at the prompt does nothing; a third message still works. An interrupt that comes between readline's prompt
    # and its waiting for a key is noticed at the next key only, hence the pause.
    time.sleep(0.5)
    terminal.send("\x03")
    terminal.expect("> ")
    terminal.send("/think off\n")
    terminal.expect("(thinking: off)")
    terminal.expect("> ")
    terminal.send("/reset\n")
    terminal.expect("(the conversation starts anew)")
    terminal.expect("> ")
    terminal.send("/think maybe\n")
    terminal.expect("/reset")
    terminal.expect("> ")
    terminal.send("hi\n")
    terminal.expect("tok/s)")
    terminal.expect("> ")
    terminal.send("\x04")
    assert terminal.ended() == 0
