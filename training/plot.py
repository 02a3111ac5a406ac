"""`python -m training.plot LOG OUT.svg`: the curves of a run's log.jsonl."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt

_CURVES = {"loss": "next token", "mtp": "MTP layer, the token after", "indexer": "indexer (KL)"}


def plot(log: Path, out: Path) -> None:
    """Losses by tokens seen, the learning rate beneath; a line where a phase begins."""
    entries = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    entries = [entry for entry in entries if entry["step"] >= 20]
    tokens = [entry["tokens"] / 1e6 for entry in entries]
    matplotlib.rcParams["svg.hashsalt"] = "tfglm"
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, height_ratios=(4, 1), figsize=(9, 5), layout="constrained")
    for name, label in _CURVES.items():
        top.plot(tokens, [entry[name] for entry in entries], label=label, linewidth=1)
    top.set_yscale("log")
    top.set_ylabel("loss (nats)")
    bottom.plot(tokens, [entry["lr"] for entry in entries], color="black", linewidth=1)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("tokens (millions)")
    before = ""
    for at, entry in zip(tokens, entries, strict=True):
        if entry["phase"] != before:
            for axes in (top, bottom):
                axes.axvline(at, color="grey", linewidth=0.5)
            top.text(at, top.get_ylim()[1], f" {entry['phase']}", va="top", fontsize=8)
            before = entry["phase"]
    top.legend()
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    plot(args.log, args.out)


if __name__ == "__main__":
    main()
