"""Where torch.distributed's groups leave each other what they need to connect.

`Board` is a store over the connections that the ranks already have; what waits on it ends with them. A group that keeps
threads of its own which ask the store later, as NCCL's do, gets `tcp_store`: torch's own, at a free port of rank 0.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tfglm.errors import RanksError
from tfglm.ranks.bootstrap import listen
from tfglm.ranks.control import Control

_LIMIT_S = 30.0


class Board(dist.Store):  # type: ignore[name-defined]
    """Keys and values of one process group, under a prefix of their own on the control's board.

    What waits here ends when the ranks do. Raises RanksError, which torch hands on as a RuntimeError. Whoever gives it
    to torch keeps it too: torch holds the C++ half alone, which fails ("Not implemented") once Python's half is gone.
    """

    def __init__(self, control: Control, prefix: str) -> None:
        super().__init__()
        self._control = control
        self._prefix = prefix

    def set(self, key: str, value: bytes | str | list[int]) -> None:
        self._control.post(self._key(key), value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._control.read(self._key(key), _LIMIT_S)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        limit_s = timeout.total_seconds() if timeout is not None else _LIMIT_S
        for key in keys:
            self._control.read(self._key(key), limit_s)

    def check(self, keys: list[str]) -> bool:
        return self._control.has([self._key(key) for key in keys])

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"


def tcp_store(control: Control, prefix: str) -> dist.Store:  # type: ignore[name-defined]
    """torch's store: rank 0 serves it, for as long as it is kept, at the address the ranks have met at and no other.

    All ranks call it at the same time. Raises RanksError when rank 0's cannot be reached.
    """
    key = f"{prefix}/store"
    host, file = control.host or "127.0.0.1", None
    if control.rank == 0:
        listener = listen((host, 0))
        port = listener.getsockname()[1]
        file = listener.detach()  # the store's from now on
    else:
        host, _, port_text = control.read(key, _LIMIT_S).decode().rpartition(" ")
        port = int(port_text)
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            control.ranks,
            is_master=control.rank == 0,
            timeout=timedelta(seconds=_LIMIT_S),
            wait_for_workers=False,
            master_listen_fd=file,
        )
    except RuntimeError as error:
        raise RanksError(f"rank {control.rank} cannot reach rank 0's store at {host}:{port}: {error}") from error
    if control.rank == 0:
        control.post(key, f"{host} {port}".encode())
    return store
