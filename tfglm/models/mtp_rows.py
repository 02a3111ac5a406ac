"""The MTP layer over ranks: every rank holds what the trunk made of the rows that wait for the layer, and rank 0 says
which of them a step takes. Rows of hidden states never travel: every rank has the trunk's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from tfglm.models.glm53 import Glm53
from tfglm.models.mtp import Mtp, MtpStep
from tfglm.models.window import LaidOut, Rows, appended, from_message, to_message
from tfglm.ops.base import Selection
from tfglm.ops.group import Fact, Message
from tfglm.ops.steps import Exchange

Part = tuple[int, int, int]
"""A stream's number, and (start, stop) of its rows in the last window of the trunk."""


class MtpRows:
    """The layer's waiting rows of all streams, by numbers that rank 0 gives out. Its side: keep, absorb, chain, forget;
    the other ranks' side: `handlers`."""

    def __init__(self, model: Glm53, mtp: Mtp) -> None:
        self._model = model
        self._mtp = mtp
        self._steps = mtp.steps
        self._waiting: dict[int, list[torch.Tensor]] = {}
        self._step: MtpStep | None = None
        self._forgotten: list[int] = []

    # ---- rank 0

    def keep(self, parts: Sequence[Part], normed: torch.Tensor) -> None:
        """Rows of the trunk's last window that were committed wait for their next tokens. normed [R, hidden]: what it
        tapped."""
        numbers = [number for part in parts for number in part]
        with self._steps.lead(Message("mtp_keep", {"parts": numbers, "forgotten": self._forgotten}), tuple):
            self._keep(parts, normed)

    def absorb(self, window: Sequence[Rows], numbers: Sequence[int], *, leave: int = 0) -> MtpStep:
        """The waiting rows of the streams `numbers` but for the last `leave` of each, through the layer. window: of
        each stream the tokens that follow those rows."""
        facts: dict[str, Fact] = {"numbers": list(numbers), "leave": leave}
        with self._laid_out(window) as rows, self._led("mtp_absorb", rows, facts):
            return self._absorb(rows, numbers, leave)

    def chain(self, window: Sequence[Rows], rows: Sequence[int]) -> MtpStep:
        """One more row of those streams of the last step that go on: `rows` of it."""
        facts = {"rows": list(rows)}
        with self._laid_out(window) as laid_out, self._led("mtp_chain", laid_out, facts):
            return self._chain(laid_out, rows)

    def _led(self, kind: str, rows: LaidOut, facts: Mapping[str, Fact]) -> AbstractContextManager[None]:
        return self._steps.lead(
            to_message(kind, rows, facts), lambda: self._mtp.exchanges(len(rows.tokens), len(rows.wanted))
        )

    def _laid_out(self, window: Sequence[Rows]) -> AbstractContextManager[LaidOut]:
        return appended(window, self._model.cache.pool, self._mtp.config)

    def forget(self, number: int) -> None:
        """A stream is over, or went on without the layer. The other ranks learn of it with the next rows."""
        self._waiting.pop(number, None)
        self._forgotten.append(number)

    # ---- other ranks

    def handlers(self) -> Mapping[str, Callable[[Message], None]]:
        """By the kind of message that announces it: this rank's part of a step."""

        def meetings(message: Message) -> list[Exchange] | None:
            return self._mtp.exchanges(len(message.arrays["tokens"]), len(message.arrays["wanted"]))

        follow = self._steps.follow
        return {
            "mtp_keep": follow(self._follow_keep, lambda _: ()),
            "mtp_absorb": follow(self._follow_absorb, meetings),
            "mtp_chain": follow(self._follow_chain, meetings),
        }

    @torch.inference_mode()
    def _follow_keep(self, message: Message) -> None:
        for number in message.integers("forgotten"):
            self._waiting.pop(number, None)
        numbers, passed = message.integers("parts"), self._model.followed
        assert passed is not None and passed.normed is not None
        self._keep([(numbers[i], numbers[i + 1], numbers[i + 2]) for i in range(0, len(numbers), 3)], passed.normed)

    @torch.inference_mode()
    def _follow_absorb(self, message: Message) -> None:
        [leave] = message.integers("leave")
        self._absorb(from_message(message), message.integers("numbers"), leave)

    @torch.inference_mode()
    def _follow_chain(self, message: Message) -> None:
        self._chain(from_message(message), message.integers("rows"))

    # ---- all ranks

    def _keep(self, parts: Sequence[Part], normed: torch.Tensor) -> None:
        self._forgotten = []
        for number, start, stop in parts:
            self._waiting.setdefault(number, []).append(normed[start:stop])

    @torch.inference_mode()
    def _absorb(self, rows: LaidOut, numbers: Sequence[int], leave: int) -> MtpStep:
        taken = []
        for number in numbers:
            hidden = torch.cat(self._waiting.pop(number))
            taken.append(hidden[: len(hidden) - leave])
            if leave:
                self._waiting[number] = [hidden[len(hidden) - leave :].clone()]  # not all of a chunk
        self._step = self._mtp.layer(rows, torch.cat(taken), None)
        return self._step

    @torch.inference_mode()
    def _chain(self, laid_out: LaidOut, rows: Sequence[int]) -> MtpStep:
        assert self._step is not None, "a chain goes on from a step"
        step, going = self._step, list(rows)
        if len(going) < len(step.rows):
            selection = Selection(step.selection.slots[going], step.selection.counts[going])
            step = MtpStep(step.logits, step.rows[going], selection)
        self._step = self._mtp.layer(laid_out, step.rows, step.selection)
        return self._step
