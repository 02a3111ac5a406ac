"""What keeps a check from being made. A wrong answer is none of these."""

from __future__ import annotations

from tfglm.errors import TfglmError


class CheckError(TfglmError):
    """The server cannot be checked."""

    code = "E_CHECK"
