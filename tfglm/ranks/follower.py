"""A follower's whole life: take rank 0's next message, do its part of the work, until rank 0 stops."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfglm.errors import RanksError
from tfglm.ops.group import Message
from tfglm.ranks.group import RankGroup

Handler = Callable[[Message], None]


def follow(group: RankGroup, handlers: Mapping[str, Handler]) -> None:
    """Serve rank 0 until it stops. handlers: by the kind of message, what this rank has loaded.

    A handler that fails, or a message of no known kind, ends all ranks: by then rank 0 waits for this one in a gather.
    Raises RanksError with what ended the ranks.
    """
    while (received := group.receive()) is not None:
        message = received.message
        handler = handlers.get(message.kind)
        if handler is None:
            known = ", ".join(sorted(handlers))
            reason = f"rank {group.rank} cannot do {message.kind!r} (message {received.number}); it can do {known}"
            group.abort(reason)
            raise RanksError(reason)
        try:
            handler(message)
        except RanksError:
            raise
        except BaseException as error:
            what = f"{type(error).__name__}: {error}"
            reason = f"rank {group.rank} failed at {message.kind!r} (message {received.number}): {what}"
            group.abort(reason)
            raise RanksError(reason) from error
        group.done(received.number)
