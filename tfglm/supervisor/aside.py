"""Blocking calls beside the event loop, in threads that may be left behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def aside(function: Callable[[], T], name: str) -> asyncio.Future[T]:
    """The result of `function`, computed in a daemon thread of its own.

    asyncio's own executor waits for its threads when the loop ends; one that hangs on a dead NFS server would keep this
    process alive for as long.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, result, failure)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
