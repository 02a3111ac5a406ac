"""The three guests as one cluster: what it says of itself, what it answers, how long it takes to get over a fault."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from guest import Guest
from host import LabError
from openai import OpenAI, OpenAIError
from playbook import Playbooks

MEMORY = "1536M"
PROMPT = "Name a colour."
DEAD_S = 5.0
"""Limit `dead` of cluster.json, as the inventory leaves it."""
SLOW_S = 20.0
"""What a machine of two cores may add to a limit when it runs three kernels, and other work beside them."""
_OVER = re.compile(r"^([\d.]+) .*?: .*start (\d+) is over: (.*)$", re.MULTILINE)


class Lab:
    """What the steps work with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = folder / "image.ext4"
        self.guests = [Guest(index, self.image, folder / f"spark{index}", MEMORY) for index in range(3)]
        self.playbooks = Playbooks(self.guests, folder)
        self.container_image = ""
        self.url = f"http://{self.guests[0].address}:8888"

    def health(self) -> str:
        """Phase in /health of rank 0: "ok" when it serves, "" for no answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return str(json.loads(answer.read())["status"])
        except (OSError, ValueError, KeyError):
            return ""

    def reply(self, limit: float = 180) -> tuple[str, float, float]:
        """What the model says to PROMPT through the openai client, seconds to the first token and to the last.
        Greedy: the same whenever it is asked."""
        client = OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=limit, max_retries=0)
        began = time.monotonic()
        first, text = 0.0, ""
        try:
            model = client.models.list().data[0].id
            asked = client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": PROMPT}],
                max_tokens=16,
                temperature=0,
                reasoning_effort="none",
                stream=True,
            )
            for chunk in asked:
                piece = chunk.choices[0].delta.content if chunk.choices else None
                if piece:
                    first = first or time.monotonic() - began
                    text += piece
        except OpenAIError as problem:
            raise LabError(f"the API did not answer: {problem}") from problem
        if not text:
            raise LabError("the reply is empty")
        return text, round(first, 2), round(time.monotonic() - began, 2)

    def remember(self, text: str) -> None:
        (self.folder / "reply").write_text(text)

    def same_reply(self) -> None:
        """Raises LabError unless the model says what it said when it was first asked."""
        before, now = (self.folder / "reply").read_text(), self.reply()[0]
        if now != before:
            raise LabError(f"the model said {before!r} before, and says {now!r} now")

    def state(self, guest: Guest) -> dict[str, Any]:
        """What the supervisor of a guest's rank knows of its own rank."""
        with suppress(ValueError, LookupError, LabError):
            text = guest.sh(f"cat /run/tfglm/rank{guest.index}.json", check=False)
            return dict(json.loads(text)["ranks"][guest.index])
        return {"phase": "none", "reason": ""}

    def until_says(self, guest: Guest, pattern: str, limit: float) -> str:
        """The reason that a rank gives for not serving, once it matches."""

        def says() -> str:
            reason = str(self.state(guest).get("reason", ""))
            return reason if re.search(pattern, reason) else ""

        return str(self.until(says, limit, f"rank {guest.index} to say {pattern!r}")[0])

    def until_served(self, limit: float = 400) -> float:
        return self.until(lambda: self.health() == "ok", limit, "the cluster to serve")[1]

    def until(self, found: Callable[[], object], limit: float, what: str) -> tuple[object, float]:
        """The first true value, and the seconds it took. Raises LabError with what every rank says of itself."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            value = found()
            if value:
                return value, round(time.monotonic() - began, 1)
            time.sleep(0.5)
        said = "; ".join(f"{g.name} {self.state(g)}" for g in self.guests)
        raise LabError(f"waited {limit:.0f} s for {what}: {said}")

    def over(self, since: float, guests: list[Guest], limit: float = 2 * DEAD_S + SLOW_S) -> dict[str, Any]:
        """Seconds from `since`, a time of this machine, which guests share, until every one of `guests` had given up
        the start that ran; and why, in the words of the first one."""
        ends: dict[str, tuple[float, str]] = {}

        def all_over() -> bool:
            for guest in guests:
                said = ""
                with suppress(LabError):  # a guest that boots, or is slow: asked again
                    said = guest.sh(
                        f"journalctl -u tfglm@{guest.index} -o short-unix --no-pager --since @{int(since) - 1}"
                    )
                found = [(float(when), why) for when, _, why in _OVER.findall(said) if float(when) >= since]
                if found:
                    ends[guest.name] = found[0]
            return len(ends) == len(guests)

        self.until(all_over, limit + 15, f"all ranks to end their engines within {limit:.0f} s")
        last, first = max(ends.values()), min(ends.values())
        if last[0] - since > limit:
            raise LabError(f"the last rank ended after {last[0] - since:.1f} s, later than {limit:.0f}: {ends}")
        return {"detected_s": round(first[0] - since, 1), "all_ended_s": round(last[0] - since, 1), "why": first[1]}

    def recover(self, since: float, limit: float = 400) -> dict[str, Any]:
        """Wait for the cluster to serve what it served before."""
        self.until_served(limit)
        served = round(time.time() - since, 1)
        self.same_reply()
        return {"served_again_s": served}

    def collect(self, name: str) -> None:
        """Journals of all guests, for whoever looks at a step that failed."""
        for guest in self.guests:
            try:
                text = guest.sh("journalctl --no-pager --lines=3000", check=False)
            except LabError as problem:
                text = str(problem)
            (self.folder / f"{name}-{guest.name}.log").write_text(text)

    def recovered(self) -> bool:
        """Whether the next step has a cluster to begin with."""
        try:
            self.until_served(200)
        except LabError:
            return False
        return True
