"""One supervisor for a rank of a node: whoever comes second must not take the first one's engine for a leftover."""

from __future__ import annotations

import socket

from tfglm.supervisor.codes import Exit, Fatal


def claim(mark: str) -> socket.socket:
    """Hold the rank until the socket is closed or this process ends, however that may be. Raises Fatal.

    A name in the abstract namespace needs no folder, and the kernel drops it with its last holder.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    try:
        sock.bind(f"\0tfglm/{mark}")
    except OSError:
        sock.close()
        raise Fatal(Exit.CONFIG, "E_WORKER", f"rank {mark} has a supervisor already; see systemctl status") from None
    return sock
