"""The life of a server: bind, answer "loading", load, try one request, serve, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from tfglm.errors import PortError
from tfglm.server.app import make_app
from tfglm.server.smoke import smoke
from tfglm.server.state import Served, ServerState
from tfglm.settings import Settings

log = logging.getLogger("tfglm.server")

T = TypeVar("T")

BACKLOG = 1024
MANY_FILES = 65536
FAREWELL_SECONDS = 2.0
"""Time for the last error events of a drain to reach their clients."""


@dataclass(frozen=True)
class Listener:
    """Sockets that already listen; clients may connect, and wait until `serve` runs."""

    sockets: tuple[socket.socket, ...]
    url: str

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()


def bind(settings: Settings) -> Listener:
    """Takes the address before anything is loaded. Port 0 takes a free one; `url` has the real port.

    Raises PortError naming host, port and what to change. Logs W_OPEN_API when others can reach it without a key.
    """
    _allow_many_files()
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PortError(f"--host {host} is not an address of this machine ({error.strerror}); try 127.0.0.1") from None
    except UnicodeError:
        raise PortError(f"--host {host!a} cannot be the name of a machine; try 127.0.0.1") from None
    addresses = dict.fromkeys((family, address) for family, _, _, _, address in found)
    sockets: list[socket.socket] = []
    for family, address in addresses:
        # All addresses of one name get the same port, also when it was free to choose.
        port = sockets[0].getsockname()[1] if sockets else port
        try:
            sockets.append(_listen(family, (address[0], port, *address[2:])))
        except OSError as error:
            for sock in sockets:
                sock.close()
            raise PortError(
                f"cannot listen on {_authority(str(address[0]), port)} ({error.strerror}); "
                "free the port or choose another with --port (0 takes any), or another address with --host"
            ) from None
    real = sockets[0].getsockname()
    if not settings.api_key and not all(_is_loopback(sock) for sock in sockets):
        log.warning(
            "W_OPEN_API: %s is reachable by others and no API key is set: anyone may use it; "
            "set TFGLM_API_KEY or listen on 127.0.0.1",
            _authority(real[0], real[1]),
        )
    return Listener(tuple(sockets), f"http://{_authority(real[0], real[1])}")


def serve(
    listener: Listener,
    settings: Settings,
    load: Callable[[], Served],
    ready: Callable[[Served, str], None],
    ranks: Callable[[], list[str]] = list,
) -> None:
    """Answers HTTP until a signal ends it. `load` runs in a thread of its own and returns a started engine; `ready` is
    called once, with the address, after a request has gone through it. Errors of `load` are raised from here. ranks:
    how the ranks besides this process's are, for /health.

    The first SIGTERM or SIGINT drains: new requests get 503, running ones `settings.drain_s` seconds. The second exits.
    """
    asyncio.run(_serve(listener, ServerState(settings, ranks), load, ready))


def make_runner(state: ServerState, shutdown_timeout: float) -> web.AppRunner:
    """The application behind aiohttp's server. Compressed bodies are refused, so nothing is unpacked either."""
    logging.getLogger("aiohttp.server").addFilter(_is_our_fault)
    return web.AppRunner(
        make_app(state),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown_timeout,
        auto_decompress=False,
    )


def _is_our_fault(record: logging.LogRecord) -> bool:
    """False for what is not HTTP: the client was told, and a traceback for each would let anyone fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


async def _serve(
    listener: Listener, state: ServerState, load: Callable[[], Served], ready: Callable[[Served, str], None]
) -> None:
    runner = make_runner(state, FAREWELL_SECONDS)
    await runner.setup()
    stop = _stop_on_signals()
    try:
        for sock in listener.sockets:
            await web.SockSite(runner, sock).start()
        served = await _unless(stop, lambda: _load_and_try(load))
        if served is None:
            return
        state.open(served)
        ready(served, listener.url)
        await stop.wait()
        await _drain(state, served)
    finally:
        await runner.cleanup()


async def _drain(state: ServerState, served: Served) -> None:
    state.draining = True
    served.engine.drain()
    if state.live:
        log.info("draining: replies that get %.0f s to finish: %d", state.settings.drain_s, len(state.live))
    await _until_quiet(state, state.settings.drain_s)
    for generation in list(state.live):
        generation.fail("draining", "the server is shutting down")
    await _until_quiet(state, FAREWELL_SECONDS)


async def _until_quiet(state: ServerState, seconds: float) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while state.live and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.02)


def _stop_on_signals() -> asyncio.Event:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def received(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, received, number)
    return stop


def _load_and_try(load: Callable[[], Served]) -> Served:
    served = load()
    smoke(served)
    return served


async def _unless(stop: asyncio.Event, work: Callable[[], T]) -> T | None:
    """`work()` from a thread of its own, or None when the signal comes first; the thread then dies with the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def report(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return  # the signal came first
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def body() -> None:
        result: T | None = None
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the signal came first, and the loop has ended since
            loop.call_soon_threadsafe(report, result, failure)

    threading.Thread(target=body, name="load", daemon=True).start()
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((future, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if future.done():
        return future.result()
    future.cancel()
    return None


def _allow_many_files() -> None:
    """Raises the soft limit: every client and every shard is an open file, and the usual 1024 are soon gone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, MANY_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _listen(family: int, address: tuple[Any, ...]) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # "::" would otherwise also take the IPv4 port and collide with 0.0.0.0.
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # Listening at once is what makes a second server on the port fail here.
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _is_loopback(sock: socket.socket) -> bool:
    return ipaddress.ip_address(str(sock.getsockname()[0]).partition("%")[0]).is_loopback


def _authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
