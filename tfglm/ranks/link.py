"""One connection between two ranks: whole frames in both directions, and the time the other side was last heard."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from typing import Any

from tfglm.ranks.messages import STRANGER, Frame, Limits, Reader, encode

_READ_BYTES = 1 << 18
_STALLED_S = 5


class Link:
    """A connected stream socket that this object owns.

    One thread reads; any thread sends. Only `send` may block, and `hang_up` from another thread ends it.
    """

    def __init__(self, sock: socket.socket, limits: Limits = STRANGER) -> None:
        sock.setblocking(True)
        # For who sends: a rank reads at all times, so one that takes nothing for so long is lost.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", _STALLED_S, 0))
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._sock = sock
        self._reader = Reader(limits)
        self._sending = threading.Lock()
        self.peer = address_text(sock.getpeername()) or "this process"
        self.host = address_text(sock.getsockname()).rpartition(":")[0].strip("[]")
        self.heard = time.monotonic()

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self, limits: Limits) -> None:
        """From now on, take frames up to these limits."""
        self._reader.limits = limits

    def send(self, data: bytes | bytearray) -> None:
        """Send a whole encoded frame, waiting for the other side to take it. Raises OSError when it is gone."""
        with self._sending:
            self._sock.sendall(data)

    def send_now(self, frame: Frame, wait_s: float = 0.0) -> bool:
        """Send a small frame if that needs no waiting for the other side; False if it was left out.

        A socket is writable when about a third of its buffer is free: a frame of some hundred bytes then fits whole.
        wait_s: for a frame that another thread is sending.
        """
        if not self._sending.acquire(timeout=wait_s):
            return False
        try:
            if not select.select([], [self._sock], [], 0)[1]:
                return False
            self._sock.sendall(encode(frame))
            return True
        except (OSError, ValueError):
            return False  # the reading side reports a lost connection
        finally:
            self._sending.release()

    def beat(self, facts: dict[str, Any]) -> None:
        """Let the other side hear that this one is alive, and how far it is."""
        self.send_now(Frame("beat", facts))

    def read(self) -> list[Frame]:
        """The frames that have come; call it when the socket is readable. Raises EOFError at the end of the connection,
        OSError when it broke, FrameError when what came is none."""
        data = self._sock.recv(_READ_BYTES)
        if not data:
            raise EOFError
        self.heard = time.monotonic()
        return self._reader.feed(data)

    def hang_up(self) -> None:
        """End the connection in both directions; a blocked send returns. What was sent before still arrives."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up and give the socket back. May be called again."""
        self.hang_up()
        self._sock.close()


def address_text(address: Any) -> str:
    """(host, port) as text; an IPv6 host in brackets. Empty for an unnamed local socket."""
    if not isinstance(address, tuple):
        return ""
    host, port = address[0], address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
