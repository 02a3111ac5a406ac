"""Where a server is, as a user may write it, and why nothing answers there."""

from __future__ import annotations

import os


def base_url(text: str) -> str:
    """`http://HOST:PORT` of an address with or without http:// and /v1."""
    url = text if "://" in text else f"http://{text}"
    return url.rstrip("/").removesuffix("/v1")


def reason(error: Exception) -> str:
    """Why no connection came about, in the system's words where it has some."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:
        return os.strerror(number).lower()
    # A name that nobody knows comes with a number below 0, of the resolver.
    said = getattr(getattr(error, "os_error", None), "strerror", None)
    return said.lower() if said else str(error) or type(error).__name__
