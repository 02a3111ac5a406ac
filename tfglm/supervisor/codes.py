"""Exit codes of `tfglm rank run`, for systemd's RestartPreventExitStatus and for people."""

from __future__ import annotations

from enum import IntEnum

from tfglm.errors import TfglmError


class Exit(IntEnum):
    """`meaning` says what happened, `again` whether systemd should start the rank again."""

    STOPPED = 0
    CONFIG = 64
    FABRIC = 65
    WEIGHTS = 66
    RUNTIME = 67
    MEMORY = 68
    PEERS = 69
    GUARD = 70
    ENGINE = 71

    @property
    def meaning(self) -> str:
        return _MEANING[self][0]

    @property
    def again(self) -> bool:
        return _MEANING[self][1]


_MEANING = {
    Exit.STOPPED: ("stopped in order", False),
    Exit.CONFIG: ("cluster.json, rank.json or a setting cannot be honoured", False),
    Exit.FABRIC: ("an address, a carrier or a GID did not come within its limit", True),
    Exit.WEIGHTS: ("the mount or the checkpoint did not come within its limit, or cannot be read", True),
    Exit.RUNTIME: ("the engine's command or image is not there", False),
    Exit.MEMORY: ("the memory plan does not fit", False),
    Exit.PEERS: ("another rank did not come within its limit", True),
    Exit.GUARD: ("memory ran short in every one of the last attempts", False),
    Exit.ENGINE: ("the engine failed too many times in a row", False),
}


class Fatal(TfglmError):
    """Ends the supervisor with `exit`; carries the code and the message of the error behind it."""

    def __init__(self, exit_code: Exit, code: str, message: str) -> None:
        super().__init__(message)
        self.exit = exit_code
        self.code = code


def table() -> str:
    """The codes as a Markdown table."""
    rows = ["| code | meaning | systemd starts it again |", "|---|---|---|"]
    rows += [f"| {int(code)} | {code.meaning} | {'yes' if code.again else 'no'} |" for code in Exit]
    return "\n".join(rows)
