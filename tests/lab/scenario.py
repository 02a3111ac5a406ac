"""What the lab does, step by step. Every step raises LabError unless it ends in the state that docs/operations.md names."""

from __future__ import annotations

import json
import shutil
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import wiring
from guest import Guest
from host import ROOT, LabError, run
from image import image
from playbook import CHECKPOINT, MODELS, Playbooks

MEMORY = "1536M"
PROMPT = "Name a colour."


class Lab:
    """Three guests and how to speak to what they serve."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image = image()
        self.guests = [Guest(index, self.image, folder / f"spark{index}", MEMORY) for index in range(3)]
        self.playbooks = Playbooks(self.guests, folder)
        self.url = f"http://{self.guests[0].address}:8888"

    def health(self) -> str:
        """What /health of rank 0 calls the cluster, "" for no answer."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return str(json.loads(answer.read())["status"])
        except (OSError, ValueError, KeyError):
            return ""

    def until_served(self, limit: float) -> float:
        return self.until(lambda: self.health() == "ok", limit, "the cluster to serve")

    def until(self, true: Callable[[], bool], limit: float, what: str) -> float:
        """Seconds until something holds. Raises LabError with what the ranks say of themselves."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            if true():
                return round(time.monotonic() - began, 1)
            time.sleep(0.5)
        raise LabError(f"waited {limit:.0f} s for {what}; ranks say: {self.said()}")

    def said(self) -> str:
        """Status line of every rank, as systemd shows it."""
        show = "systemctl show --property=ActiveState,SubState,StatusText,NRestarts"
        lines = [g.sh(f"{show} tfglm@{g.index}", check=False).replace("\n", " ") for g in self.guests]
        return "; ".join(lines)

    def collect(self, name: str) -> None:
        """Journals of all guests, for whoever looks at a step that failed."""
        for guest in self.guests:
            try:
                text = guest.sh("journalctl --no-pager --lines=3000", limit=60, check=False)
            except LabError as problem:
                text = str(problem)
            (self.folder / f"{name}-{guest.name}.log").write_text(text)

    def recovered(self) -> bool:
        """Whether the next step has a cluster to begin with."""
        try:
            self.until_served(120)
        except LabError:
            return False
        return True


def boot(lab: Lab) -> dict[str, object]:
    """Three guests to ssh."""
    wiring.up()
    for guest in lab.guests:
        (guest.folder / "disk").unlink(missing_ok=True)
        guest.start()
    return {guest.name: round(guest.wait(), 1) for guest in lab.guests}


def site(lab: Lab) -> dict[str, object]:
    """From bare machines to a served model, the checkpoint lying on the head."""
    tiny = lab.folder / "tiny"
    if not tiny.exists():
        run([Path(sys.executable).with_name("tfglm"), "synth", tiny, "--preset", "tiny"], 300)
    head = lab.guests[0]
    head.sh(f"install -d -o spark {MODELS}")
    archive = shutil.make_archive(str(lab.folder / "tiny"), "tar", lab.folder, "tiny")
    head.upload(Path(archive), "/tmp/tiny.tar")
    head.sh(f"tar -C {MODELS} --no-same-owner -xf /tmp/tiny.tar && chown -R spark {CHECKPOINT}")
    play = lab.playbooks.run("site")
    return {"playbook_s": round(play.seconds), "changed": dict(play.changed)}


def chat(lab: Lab) -> dict[str, object]:
    """The openai client, from outside the guests."""
    from openai import OpenAI

    client = OpenAI(base_url=f"{lab.url}/v1", api_key="none", timeout=180, max_retries=0)
    model = client.models.list().data[0].id
    began = time.monotonic()
    stream = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=16, temperature=0, stream=True
    )
    first, pieces = 0.0, 0
    for chunk in stream:
        if chunk.choices and not first:
            first = time.monotonic() - began
        pieces += 1
    if not pieces:
        raise LabError("the stream had no chunk")
    return {"model": model, "first_token_s": round(first, 2), "reply_s": round(time.monotonic() - began, 1)}


STEPS: dict[str, Callable[[Lab], dict[str, object]]] = {step.__name__: step for step in (boot, site, chat)}
FOUNDATIONS = ("boot", "site")
"""Steps that the later ones stand on."""
