"""API keys: `Authorization: Bearer KEY` or `x-api-key: KEY`, compared in constant time over digests."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping

from tfglm.server.errors import ApiError


class ApiKeys:
    """The accepted keys, from a comma-separated list; an empty list accepts everybody."""

    def __init__(self, keys: str) -> None:
        self._digests = [_digest(key) for part in keys.split(",") if (key := part.strip())]

    @property
    def required(self) -> bool:
        return bool(self._digests)

    def accepts(self, headers: Mapping[str, str]) -> bool:
        if not self._digests:
            return True
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        sent = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(sent)
        # Every key is compared, so that the time taken says nothing about which one came close.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises the 401 that clients know."""
        if not self.accepts(headers):
            raise ApiError(
                401,
                "missing or wrong API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
