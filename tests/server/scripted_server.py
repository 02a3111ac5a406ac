"""A server process over the scripted engine: `python scripted_server.py CHECKPOINT [--flag value ...]`.

It answers every message with thinking and then words. --pause is in seconds a word. With --hold, loading ends at the
first SIGUSR1, and replies end from the second on.
"""

from __future__ import annotations

import argparse
import logging
import signal
import threading
from pathlib import Path

from scripted import CONTEXT, MODEL, FakeEngine, finished

from tfglm.engine.api import Delta, Started
from tfglm.engine.tokenizer import Tokenizer
from tfglm.errors import TfglmError
from tfglm.server.info import ModelInfo
from tfglm.server.run import bind, serve
from tfglm.server.state import Served
from tfglm.server.template import ChatTemplate
from tfglm.settings import Settings

WORDS = ["one ", "two ", "three ", "four ", "five"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--hold", action="store_true")
    parser.add_argument("--fail", action="store_true")
    for name in ("host", "port", "api_key", "drain_s"):
        parser.add_argument(f"--{name}")
    args = parser.parse_args()
    logging.basicConfig(level="INFO")
    settings = Settings.from_sources({name: getattr(args, name) for name in ("host", "port", "api_key", "drain_s")})
    go_on = threading.Event()
    signal.signal(signal.SIGUSR1, lambda number, frame: go_on.set())
    listener = bind(settings)
    print(f"bound {listener.url}", flush=True)

    def load() -> Served:
        if args.hold:
            go_on.wait()
            go_on.clear()
        if args.fail:
            raise TfglmError("no such luck")
        words = [step for word in WORDS for step in (Delta("answer", word, (3,)), args.pause)]
        engine = FakeEngine(
            [
                Started(1.0),
                Delta("reasoning", "let me count", (3,)),
                *words,
                *([go_on] if args.hold else []),
                finished(),
            ]
        )
        engine.quick = {"smoke"}
        folder = args.checkpoint
        return Served(
            engine, Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder), ModelInfo(MODEL, CONTEXT)
        )

    serve(listener, settings, load, lambda served, url: print(f"ready {url}", flush=True))
    print("stopped", flush=True)


if __name__ == "__main__":
    main()
