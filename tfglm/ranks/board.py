"""torch.distributed's store over the connections the ranks already have: no second server, no second port."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from tfglm.ranks.control import Control

_LIMIT_S = 30.0


class Board(dist.Store):  # type: ignore[name-defined]
    """Keys and values of one process group, under a prefix of their own on the control's board.

    What waits here ends when the ranks do. Raises RanksError, which torch hands on as a RuntimeError.
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
