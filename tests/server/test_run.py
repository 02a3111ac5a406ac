"""The life of a server process: its address, loading, readiness, draining, its end."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from dataclasses import replace
from typing import Any

import pytest
from processes import HERE, ServerProcess
from scripted import MODEL

from tfglm.errors import PortError
from tfglm.server.run import _unless, bind
from tfglm.settings import Settings

SCRIPT = HERE / "scripted_server.py"


def settings(**values: Any) -> Settings:
    return replace(Settings(), port=0, **values)


def get(url: str) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def chat(url: str, **fields: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **fields}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=60)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
            return True
    except OSError:
        return False


def test_a_port_in_use_is_found_before_anything_else():
    first = bind(settings())
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(PortError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*--port") as caught:
        bind(replace(settings(), port=port))
    assert caught.value.code == "E_PORT"
    first.close()
    bind(replace(settings(), port=port)).close()


def test_open_files_are_not_held_to_the_soft_limit():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        bind(settings()).close()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert hard == before[1] and soft == (65536 if hard == resource.RLIM_INFINITY else min(hard, 65536))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("host", ["a..b", "x" * 300, "\udcff"])
def test_a_host_that_no_machine_can_have(host):
    with pytest.raises(PortError, match=r"--host '.*' cannot be the name of a machine; try 127\.0\.0\.1"):
        bind(settings(host=host))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(PortError, match=host.replace(".", r"\.")):
        bind(settings(host=host))


def test_addresses(caplog):
    for host in ("127.0.0.1", "localhost"):
        listener = bind(settings(host=host))
        assert len({sock.getsockname()[1] for sock in listener.sockets}) == 1
        with socket.create_connection((host, int(listener.url.rpartition(":")[2])), 5):
            pass
        listener.close()
    assert "W_OPEN_API" not in caplog.text


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6_addresses(caplog):
    listener = bind(settings(host="::1"))
    assert listener.url.startswith("http://[::1]:")
    with socket.create_connection(("::1", int(listener.url.rpartition(":")[2])), 5):
        pass
    listener.close()
    assert "W_OPEN_API" not in caplog.text


@pytest.mark.parametrize(("key", "warned"), [("", True), ("secret", False)])
def test_a_public_address_without_a_key_warns(caplog, key, warned):
    with caplog.at_level(logging.WARNING):
        listener = bind(settings(host="0.0.0.0", api_key=key))
    listener.close()
    assert ("W_OPEN_API" in caplog.text) is warned
    assert "secret" not in caplog.text


def test_loading_then_ready_then_drained(checkpoint):
    """The socket answers while the model loads; SIGTERM lets the running reply end and refuses new ones."""
    with ServerProcess(SCRIPT, checkpoint, "--port", "0", "--hold") as server:
        url = server.wait_for("bound (http://.*)")
        assert get(url + "/health") == (503, {"status": "loading"})
        assert get(url + "/v1/models")[1]["error"]["code"] == "loading"
        server.send(signal.SIGUSR1)
        server.wait_for("(ready)")
        assert get(url + "/health")[0] == 200
        stream = chat(url, stream=True)
        stream.readline()
        server.send(signal.SIGTERM)
        while get(url + "/health")[1]["status"] != "draining":
            time.sleep(0.02)
        with pytest.raises(urllib.error.HTTPError) as caught:
            chat(url)
        assert caught.value.code == 503 and caught.value.headers["Retry-After"]
        server.send(signal.SIGUSR1)
        text = stream.read().decode()
        assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"stop"' in text
        assert server.ended() == 0


def test_what_does_not_end_in_time_gets_an_error(checkpoint):
    flags = ("--port", "0", "--pause", "30", "--drain_s", "0.2")
    with ServerProcess(SCRIPT, checkpoint, *flags) as server:
        url = server.wait_for("ready (http://.*)")
        stream = chat(url, stream=True)
        stream.readline()
        server.send(signal.SIGINT)
        *_, error, done = stream.read().decode().rstrip("\n").split("\n\n")
        assert done == "data: [DONE]"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "draining"
        assert server.ended() == 0


def test_the_second_signal_ends_at_once(checkpoint):
    with ServerProcess(SCRIPT, checkpoint, "--port", "0", "--pause", "60") as server:
        url = server.wait_for("ready (http://.*)")
        stream = chat(url, stream=True)
        stream.readline()
        server.send(signal.SIGTERM)
        while get(url + "/health")[1]["status"] != "draining":
            time.sleep(0.02)
        server.send(signal.SIGTERM)
        assert server.ended(5) == 128 + signal.SIGTERM


def test_a_signal_while_loading_ends_at_once(checkpoint):
    with ServerProcess(SCRIPT, checkpoint, "--port", "0", "--hold") as server:
        url = server.wait_for("bound (http://.*)")
        get(url + "/health")
        server.send(signal.SIGTERM)
        assert server.ended(10) == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_that_ends_after_the_server_disturbs_nobody(fails, monkeypatch):
    """As one of ranks does when another was lost: the server is told to end, then the load fails."""
    unhandled, server_ended, failure = [], threading.Event(), RuntimeError("too late")
    monkeypatch.setattr(threading, "excepthook", unhandled.append)

    def load():
        assert server_ended.wait(60)
        if fails:
            raise failure

    async def stopped_at_once():
        stop = asyncio.Event()
        stop.set()
        return await _unless(stop, load)

    assert asyncio.run(stopped_at_once()) is None
    [thread] = [thread for thread in threading.enumerate() if thread.name == "load"]
    server_ended.set()
    thread.join(60)
    assert not thread.is_alive() and not unhandled


def test_a_model_that_does_not_load(checkpoint):
    with ServerProcess(SCRIPT, checkpoint, "--port", "0", "--fail") as server:
        server.wait_for("(TfglmError: E_INTERNAL: no such luck)")
        assert server.ended() == 1


def test_idle_connections_do_not_hold_up_the_end(checkpoint):
    with ServerProcess(SCRIPT, checkpoint, "--port", "0") as server:
        url = server.wait_for("ready (http://.*)")
        host, port = url.removeprefix("http://").split(":")
        sockets = [socket.create_connection((host, int(port))) for _ in range(3)]
        sockets[0].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert sockets[0].recv(100).startswith(b"HTTP/1.1 200")
        begin = time.monotonic()
        server.send(signal.SIGTERM)
        assert server.ended() == 0
        assert time.monotonic() - begin < 10
        for sock in sockets:
            sock.close()


def test_threads_that_send_at_once_all_get_answers(checkpoint):
    with ServerProcess(SCRIPT, checkpoint, "--port", "0") as server:
        url = server.wait_for("ready (http://.*)")
        replies: list[str] = []

        def ask() -> None:
            with chat(url) as response:
                replies.append(json.load(response)["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=ask) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert replies == ["one two three four five"] * 16
