"""One rank without a model, as a process of its own: it sums what rank 0 tells it to, and says what happens to it.

Run with one argument, a JSON object: rank, ranks, port, host, facts, wire, phase, stand ({"rank": seconds}: so long in
the fourth sum), limit_s, lost_s, step_s, settings. Phases: "busy" sums without end, "idle" sums three times and then
waits, "done" sums three times and ends. Each line it prints is a JSON object with "event" and "at" (seconds of one
clock).
"""

import json
import logging
import os
import sys
import time

os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from tfglm.errors import TfglmError
from tfglm.ranks.bootstrap import join, lead, listen
from tfglm.ranks.control import Control, Timing, end_process_on_failure


def say(event: str, **facts: object) -> None:
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def meet_the_others(plan: dict) -> Control:
    timing = Timing(lost_s=plan.get("lost_s", 5.0), step_s=plan.get("step_s", 300.0))
    common = {
        "limit_s": plan.get("limit_s", 60.0),
        "timing": timing,
        "progress": lambda line: say("progress", line=line),
    }
    host, rank, ranks = plan.get("host", "127.0.0.1"), plan["rank"], plan["ranks"]
    if rank:
        return join((host, plan["port"]), rank, ranks, plan.get("facts", {}), source=plan.get("source", ""), **common)
    listener = listen((host, plan["port"]))
    say("listening", port=listener.getsockname()[1])
    expected = {int(rank): where for rank, where in plan.get("expected", {}).items()}
    return lead(listener, ranks, plan.get("facts", {}), expected=expected, **common)


def work(plan: dict, control: Control) -> None:
    import torch

    from tfglm.ops.group import Message
    from tfglm.ranks.follower import follow
    from tfglm.ranks.group import RankGroup
    from tfglm.ranks.wires import open_wire

    torch.set_num_threads(1)
    rank = plan["rank"]
    wire = open_wire(plan.get("wire", "gloo"), control, limit_s=plan.get("step_s", 300.0))
    group = RankGroup(wire, control, plan.get("settings", ""))
    end_process_on_failure(control)
    group.meet("loading", 60.0)
    say("ready")

    def add(message: Message) -> None:
        x = message.arrays["x"]
        if message.facts["number"] == 4:
            time.sleep(plan.get("stand", {}).get(str(rank), 0))
        total = group.sum(x * (rank + 1))
        say("sum", number=message.facts["number"], value=float(total.sum()))

    if rank:
        follow(group, {"add": add})
    else:
        phase = plan.get("phase", "done")
        number = 0
        while phase == "busy" or number < 3:
            number += 1
            message = Message("add", {"number": number}, {"x": torch.full((2, 3), float(number))})
            group.announce(message)
            add(message)
            if phase == "busy":
                time.sleep(0.01)
        if phase == "idle":
            say("idle")
            control.failure(600.0)
            control.check()
    group.close()


def main() -> int:
    logging.basicConfig(level=logging.INFO)
    plan = json.loads(sys.argv[1])
    try:
        control = meet_the_others(plan)
        say("joined")
        work(plan, control)
    except TfglmError as error:
        say("error", type=type(error).__name__, message=str(error))
        sys.stderr.flush()
        os._exit(3)
    say("end")
    return 0


if __name__ == "__main__":
    sys.exit(main())
