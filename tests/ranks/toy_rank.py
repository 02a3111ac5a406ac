"""One rank without a model, as a process of its own: it sums what rank 0 tells it to, and says what happens to it.

A plan: rank, ranks, port, host, source, facts, expected, wire, device, phase, stand ({rank: seconds}: so long in the
fourth sum), absent ({rank: seconds}: so long before it enters the gather of the fourth sum, which it has come to), load
({rank: seconds}: so long before it is ready), limit_s, lost_s, step_s, settings, network (the path of a network
namespace). Phases: "busy" sums without end, "idle" sums three times and then waits, "done" sums three times and ends,
"captured" does so in a CUDA graph, "lagging" sums on a GPU that is late, "storm" gathers thousands of times without a
pause and checks every value.
"""

import ctypes
import itertools
import logging
import os
import random
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from tfglm.errors import TfglmError
from tfglm.ops.group import Message
from tfglm.ranks.bootstrap import join, lead, listen
from tfglm.ranks.control import Control, Timing, end_process_on_failure
from tfglm.ranks.follower import follow
from tfglm.ranks.group import RankGroup
from tfglm.ranks.wires import open_wire

_said: Connection


def say(event: str, **facts: object) -> None:
    """Tell the test. "at" is on the clock that all processes share."""
    _said.send({"event": event, "at": time.monotonic(), **facts})


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
    return lead(listener, ranks, plan.get("facts", {}), expected=plan.get("expected", {}), **common)


def work(plan: dict, control: Control) -> None:
    torch.set_num_threads(1)
    rank, device = plan["rank"], plan.get("device", "cpu")
    if device == "cuda":
        torch.cuda.set_device(rank)
    end_process_on_failure(control)
    wire = open_wire(plan.get("wire", "gloo"), control, limit_s=plan.get("step_s", 300.0))
    if rank in plan.get("absent", {}):
        wire.gather = absent(wire.gather, plan["absent"][rank])
    group = RankGroup(wire, control, plan.get("settings", ""))
    time.sleep(plan.get("load", {}).get(rank, 0))
    group.meet("loading", 60.0)
    say("ready")

    def add(message: Message) -> None:
        x = message.arrays["x"].to(device)
        if message.facts["number"] == 4:
            time.sleep(plan.get("stand", {}).get(rank, 0))
        total = group.sum(x * (rank + 1))
        say("sum", number=message.facts["number"], value=float(total.sum()))

    if plan.get("phase") == "captured":
        captured(group)
    elif plan.get("phase") == "lagging":
        say("lagging", sum=lagging(group))
        group.meet("the end", 60.0)
    elif plan.get("phase") == "storm":
        say("storm", wrong=storm(group))
        group.meet("the end", 60.0)
    elif rank:
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


def storm(group: RankGroup) -> int:
    """How many of 3000 gathers brought a value that is not what its rank put in. Places are reused at every size."""
    generator = random.Random(3)
    wrong = 0
    for number in range(3000):
        size = generator.choice([1, 2, 700, 6144, 40_000])
        gathered = group.gather(torch.full((size,), 4 * number + group.rank))
        wrong += any(not bool((part == 4 * number + rank).all()) for rank, part in enumerate(gathered))
    return wrong


def absent(gather: Callable[[torch.Tensor], torch.Tensor], seconds: float) -> Callable[[torch.Tensor], torch.Tensor]:
    numbers = itertools.count(1)

    def late(tensor: torch.Tensor) -> torch.Tensor:
        if next(numbers) == 4:
            time.sleep(seconds)
        return gather(tensor)

    return late


def captured(group: RankGroup) -> None:
    x = torch.ones(2, 3, device="cuda")
    group.sum(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = group.sum(x)
    for number in (1, 2, 3):
        x.fill_(float(number * (group.rank + 1)))
        group.replay(graph)
        torch.cuda.synchronize()
        say("sum", number=number, value=float(total.sum()))
    group.meet("the end", 60.0)


def lagging(group: RankGroup) -> float:
    """The sum of 60 sums, before each of which the last rank's device works for a tenth of a second."""
    total = torch.zeros(1, device="cuda")
    for _ in range(60):
        if group.rank == group.ranks - 1:
            torch.cuda._sleep(200_000_000)  # cycles, of some 2 GHz
        total += group.sum(torch.full((1,), group.rank + 1.0, device="cuda"))
    return float(total)


def enter_network(path: str) -> None:
    """Move this process into a network namespace."""
    with Path(path).open() as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0x40000000) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def run(plan: dict, said: Connection, log: str) -> None:
    """A toy rank's process. Ends with exit code 0 after an orderly end, 3 after an error, 69 when it was ended."""
    global _said
    _said = said
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    logging.basicConfig(level=logging.INFO)
    code = 0
    try:
        if "network" in plan:
            enter_network(plan["network"])
        control = meet_the_others(plan)
        say("joined")
        work(plan, control)
        say("end")
    except TfglmError as error:
        say("error", type=type(error).__name__, message=str(error))
        code = 3
    os._exit(code)
