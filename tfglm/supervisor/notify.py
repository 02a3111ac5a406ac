"""systemd's notification protocol: datagrams of NAME=value lines to the socket named $NOTIFY_SOCKET (sd_notify(3)).

Without such a socket every call does nothing, so that a rank can be run by hand.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""What a child must not inherit: it would speak for this process."""


class Notifier:
    """Sends READY, STATUS, WATCHDOG and STOPPING. Never blocks and never raises: a rank outlives a busy systemd."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._path = environ.get("NOTIFY_SOCKET", "")
        self._socket: socket.socket | None = None
        self._status = ""
        self._last_ping = float("-inf")
        self.watchdog_s = 0.0
        """Pings are due within this many seconds; 0 without a watchdog."""
        if self._path:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
            self._socket.setblocking(False)
        wanted = environ.get("WATCHDOG_USEC", "")
        if self._socket and wanted.isdigit() and environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            self.watchdog_s = int(wanted) / 1e6

    def ready(self) -> None:
        self._send("READY=1")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        """One line for `systemctl status`; repeated ones are not sent again."""
        line = " ".join(text.split())
        if line != self._status:
            self._status = line
            self._send(f"STATUS={line}")

    def more_time(self, seconds: float) -> None:
        """Moves the end of systemd's start or stop limit to `seconds` from now."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(seconds * 1e6)}")

    def ping(self) -> None:
        """The watchdog's ping, sent at most four times an interval. Call it from the loop whose life it proves."""
        now = time.monotonic()
        if self.watchdog_s and now - self._last_ping >= self.watchdog_s / 4:
            self._last_ping = now
            self._send("WATCHDOG=1")

    def _send(self, message: str) -> None:
        if self._socket is None:
            return
        # A leading @ stands for the zero byte of an abstract name.
        address = "\0" + self._path[1:] if self._path.startswith("@") else self._path
        try:
            self._socket.sendto(message.encode(), address)
        except OSError as error:
            log.debug("%s could not be sent to %s: %s", message, self._path, error)
