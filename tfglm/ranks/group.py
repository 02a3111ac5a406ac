"""The group of a model spread over ranks: a wire for tensors, a control for messages, and the proof that all agree.

Every message carries its number and a checksum chained from the settings through all messages before it. A follower
computes both itself; where they differ the ranks are no longer doing the same thing, and all end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tfglm.errors import RanksError
from tfglm.ops.group import Message
from tfglm.ranks.control import Control
from tfglm.ranks.messages import ITEM_BYTES, Array, Frame, encode
from tfglm.ranks.staging import as_bytes
from tfglm.ranks.wire import Wire

# A broken wire and a lost rank come together; the control knows which rank it was a moment later.
_REASON_S = 2.0
_CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class Numbered:
    """A message as a follower gets it: number 1, 2, 3, ..."""

    number: int
    message: Message


class RankGroup:
    """One rank's view of all ranks; implements tfglm.ops.group.Group. Wire and control belong to it.

    settings: what every rank was started with, in a form that is equal on all; the checksums begin with it.
    """

    def __init__(self, wire: Wire, control: Control, settings: str = "") -> None:
        self._wire = wire
        self._control = control
        self.rank = wire.rank
        self.ranks = wire.ranks
        self._number = 0
        self._said = hashlib.blake2b(settings.encode(), digest_size=_CHECKSUM_BYTES)
        self._arrivals = arrivals = wire.arrivals
        control.on_failure(lambda error: wire.abort(error.message))
        if arrivals is not None:
            control.before_beats(lambda: control.left(arrivals.last()))

    @property
    def capturable(self) -> bool:
        return self._wire.capturable

    @property
    def control(self) -> Control:
        return self._control

    # -- messages

    def announce(self, message: Message) -> None:
        """Rank 0: send a message to all other ranks. Raises RanksError once the ranks have ended."""
        if self.rank != 0:
            raise RanksError(f"rank {self.rank} announces {message.kind!r}; only rank 0 may")
        facts = {"number": self._number + 1, "kind": message.kind, "facts": dict(message.facts)}
        arrays = [_array(name, tensor) for name, tensor in message.arrays.items()]
        checksum = Array("checksum", "uint8", (_CHECKSUM_BYTES,), bytes(_CHECKSUM_BYTES))
        data = encode(Frame("work", facts, (*arrays, checksum)))
        data[-_CHECKSUM_BYTES:] = self._chained(data)
        self._number += 1
        self._control.announce(self._number, message.kind, data)

    def receive(self) -> Numbered | None:
        """A follower: the next message, checked; None when rank 0 has stopped. Raises RanksError, on all ranks, when
        it is not the one this rank expects."""
        frame = self._control.receive()
        if frame is None:
            return None
        facts = frame.facts
        theirs, mine = frame.received[-_CHECKSUM_BYTES:], self._chained(frame.received)
        self._number += 1
        number, kind = facts.get("number"), facts.get("kind")
        if number != self._number or not isinstance(kind, str):
            self._end(f"rank 0 sent message {number} ({kind}); rank {self.rank} is at message {self._number}")
        if theirs != mine:
            self._end(
                f"message {number} ({kind}) has checksum {theirs.hex()} on rank 0 and {mine.hex()} on rank "
                f"{self.rank}: they have not been doing the same"
            )
        arrays = {array.name: _tensor(array) for array in frame.arrays[:-1]}
        return Numbered(self._number, Message(str(kind), facts["facts"], arrays))

    def done(self, number: int) -> None:
        """A follower: this message's work is finished."""
        self._control.done(number)

    def _chained(self, data: bytes | bytearray) -> bytes:
        """The checksum of all messages up to the one whose bytes these are; it is the last of them."""
        self._said.update(memoryview(data)[:-_CHECKSUM_BYTES])
        return self._said.digest()

    # -- tensors

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """[R, H] float32 of every rank, added rank 0 first, so that all ranks hold the same bits."""
        parts = self.gather(partial)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total

    def concat(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """Columns of all ranks: [R, widths[rank]] -> [R, sum(widths)]. Padded to the widest on the way."""
        missing = max(widths) - part.shape[-1]
        parts = self.gather(torch.nn.functional.pad(part, (0, missing)) if missing else part)
        return torch.cat([parts[rank, ..., :width] for rank, width in enumerate(widths)], dim=-1)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """[ranks, *shape]. Raises RanksError, naming what ended the ranks."""
        if part.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._gathered(part)  # `replay` comes to it
        number = self._control.came(self.ranks * part.numel() * part.element_size())
        gathered = self._gathered(part)
        self._launched(number)
        return gathered

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        """Run a captured graph, whose gathers count as one."""
        number = self._control.came(0)
        graph.replay()
        self._launched(number)

    def _gathered(self, part: torch.Tensor) -> torch.Tensor:
        try:
            return self._wire.gather(part)
        except RanksError as error:
            self._control.failure(_REASON_S)
            self._control.fail(error)
            self._control.check()
            raise

    def _launched(self, gather: int) -> None:
        """Who waits for the data has it by now; otherwise the device says when it has come."""
        if self._arrivals is None:
            self._control.left(gather)
        else:
            self._arrivals.launched(gather)

    # -- the end

    def meet(self, what: str, limit_s: float, progress: Callable[[str], None] | None = None) -> None:
        """Wait until all ranks have come to `what`; see Control.meet."""
        if progress is None:
            self._control.meet(what, limit_s)
        else:
            self._control.meet(what, limit_s, progress)

    def check(self) -> None:
        self._control.check()

    def abort(self, reason: str) -> None:
        """End all ranks with this reason."""
        self._control.fail(RanksError(reason))

    def close(self) -> None:
        """Rank 0: stop the followers. All: give wire and connections back. May be called again."""
        self._control.close()
        self._wire.close()

    def _end(self, reason: str) -> None:
        self.abort(reason)
        self._control.check()


def _array(name: str, tensor: torch.Tensor) -> Array:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES:
        raise TypeError(f"array {name!r} of a message is {dtype}; it can be {', '.join(ITEM_BYTES)}")
    return Array(name, dtype, tuple(tensor.shape), as_bytes(tensor.cpu()).numpy().data)


def _tensor(array: Array) -> torch.Tensor:
    if not array.data:
        return torch.empty(array.shape, dtype=getattr(torch, array.dtype))
    data = torch.frombuffer(bytearray(array.data), dtype=torch.uint8)
    return data.view(getattr(torch, array.dtype)).reshape(array.shape)
