"""The errors a user meets. Each carries a stable code; the message names the thing, its value and what would work."""

from __future__ import annotations


class TfglmError(Exception):
    """Base of every error that is reported as one clear line instead of a traceback."""

    code = "E_INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class ConfigError(TfglmError):
    """A setting or a field of config.json that cannot be honoured."""

    code = "E_CONFIG"


class CheckpointError(TfglmError):
    """A checkpoint whose files do not hold what its configuration says; names tensor and file."""

    code = "E_CHECKPOINT"


class MemoryShortError(TfglmError):
    """What was asked for does not fit; the message carries the figures."""

    code = "E_MEMORY"


class PortError(TfglmError):
    """The address to listen on cannot be used."""

    code = "E_PORT"


class RanksError(TfglmError):
    """The ranks of a model cannot go on together; names the rank it is about."""

    code = "E_RANKS"


class RankMismatch(RanksError):
    """A rank was started with other settings, code, checkpoint or kernels; names the field and both values."""


class RankNeverCame(RanksError):
    """A rank did not join within the limit."""


class WorkerError(TfglmError):
    """A machine of the cluster, or a program on it, does not do what it was asked to; names both."""

    code = "E_WORKER"
