"""Stands in for `tfglm plan` and `tfglm engine`: misbehaves as a file beside the checkpoint says.

fake_engine.py plan PATH --json --ranks G        prints PATH/plan.json
fake_engine.py engine PATH --rank N ...          obeys PATH/rankN.json; rank 0 answers /health; notes its starts in
                                                 $FAKE_NOTES, or PATH
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("path", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    args, _ = parser.parse_known_args()
    if args.what == "plan":
        print((args.path / "plan.json").read_text())
        return
    behaviour = args.path / f"rank{args.rank}.json"
    how = json.loads(behaviour.read_text()) if behaviour.exists() else {}
    with (Path(os.environ.get("FAKE_NOTES", args.path)) / "starts").open("a") as log:
        log.write(f"{args.rank} {os.getpid()}\n")
    misbehave(args.path, args.rank, how)
    if args.rank == 0:
        serve(args.path, how)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if how.get("deaf") else lambda *_: sys.exit(0))
    while True:
        time.sleep(0.05)


def misbehave(path: Path, rank: int, how: dict[str, object]) -> None:
    if how.get("garbage"):
        os.write(1, bytes(range(256)) * 300 + b"x" * 100000 + b"\n")
        os.write(2, b"E_CHECKPOINT: looks \xff broken\n")
    if how.get("forks"):
        # One in the group, one that has left it, both deaf.
        for leave in (False, True):
            child = subprocess.Popen(SLEEPER, start_new_session=leave)
            with (path / "children").open("a") as log:
                log.write(f"{child.pid}\n")
    if "exits" in how:
        print(f"tfglm: {how.get('says', 'E_CONFIG: as told')}", flush=True)
        os._exit(int(str(how["exits"])))


def serve(path: Path, how: dict[str, object]) -> None:
    """/health as `tfglm serve` answers it; SIGTERM drains for how["drains"] seconds."""
    draining = threading.Event()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            health = path / "health.json"
            facts = json.loads(health.read_text()) if health.exists() else {"status": "ok", "generation_tokens": 7}
            if draining.is_set():
                facts = {"status": "draining"}
            body = json.dumps(facts).encode()
            self.send_response(200 if facts["status"] == "ok" else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *words: object) -> None:
            pass

    def drain(*_: object) -> None:
        draining.set()
        threading.Timer(float(str(how.get("drains", 0.1))), lambda: os._exit(0)).start()

    if how.get("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, drain)
    server = ThreadingHTTPServer(("127.0.0.1", int(os.environ["TFGLM_PORT"])), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        with contextlib.suppress(InterruptedError):
            time.sleep(60)


if __name__ == "__main__":
    main()
