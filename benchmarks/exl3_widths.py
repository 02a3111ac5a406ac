"""What EXL3 widths cost the trained tiny model: KL divergence from its BF16 weights on held-out conversations.

    python benchmarks/exl3_widths.py SRC [--keep FOLDER] [--recipes 2,3,4] [--device cuda] [--out FILE]

SRC is the BF16 checkpoint that training/run.py exports. Calibrated on conversations of the training mixture, measured
on others: over all tokens, and over those that the model itself writes (replies with their thinking). --keep: where the
pack of 2.75 bits is left, if it is among the recipes. --pack: one that is there already, measured beside the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from tokenizers import Tokenizer

from tfglm.checkpoint.store import Checkpoint
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.run import quantise_checkpoint
from training.data.conversation import render
from training.data.mixture import SHORT, conversation
from training.data.pack import REPLY, Marker

SHIPPED = "2.75 mixed"
RECIPES = {
    SHIPPED: Recipe(2.75, (2.0, 3.0, 4.0)),
    "2": Recipe(2, (2.0,)),
    "2.5 mul1": Recipe(2.5, (2.5,), "mul1"),
    "3": Recipe(3, (3.0,)),
    "4": Recipe(4, (4.0,)),
}
HELD_OUT = 80
"""Conversations."""


def token_lists(tokenizer: Tokenizer, seed: str, count: int) -> list[list[int]]:
    rng = Random(seed)
    return [tokenizer.encode(render(conversation(rng, SHORT)), add_special_tokens=False).ids for _ in range(count)]


def log_probabilities(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """Of every text float32 [tokens, vocabulary]."""
    found = []
    with Checkpoint.open(folder) as checkpoint:
        model = load_model(checkpoint, tokens=max(map(len, texts)), kv="fp32")
    for tokens in texts:
        stream = model.open_stream()
        found.append(torch.log_softmax(model.forward([Rows(stream, tokens, len(tokens))]), dim=1))
        stream.close()
    return found


def figures(expected: list[torch.Tensor], found: list[torch.Tensor], replies: list[torch.Tensor]) -> dict[str, float]:
    kl = torch.cat([(a.exp() * (a - b)).sum(1) for a, b in zip(expected, found, strict=True)])
    same = torch.cat([a.argmax(1) == b.argmax(1) for a, b in zip(expected, found, strict=True)])
    reply = torch.cat(replies)
    return {
        "kl": float(kl.mean()),
        "kl_of_replies": float(kl[reply].mean()),
        "same_first_choice_in_replies": float(same[reply].float().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--pack", type=Path, help="a pack that is there already")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="which of: " + ", ".join(RECIPES))
    parser.add_argument("--calibration", type=int, default=1200, help="conversations to calibrate on")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/exl3_widths.json"))
    parser.add_argument("--device", default="cpu", help="where to quantise; the measuring is done on the CPU")
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.source / "tokenizer.json"))
    marker = Marker(tokenizer)
    calibration = token_lists(tokenizer, "calibration", args.calibration)
    texts = token_lists(tokenizer, "held out", HELD_OUT)
    # The row before a token is the one that foretells it.
    weights = [marker.weights(np.array(tokens, np.uint16)) for tokens in texts]
    replies = [torch.from_numpy(np.append(w[1:] == REPLY, False)) for w in weights]
    expected = log_probabilities(args.source, texts)
    results = []
    if args.pack:
        results.append({"recipe": "as shipped"} | figures(expected, log_probabilities(args.pack, texts), replies))
    with tempfile.TemporaryDirectory() as scratch:
        for name, recipe in RECIPES.items():
            if name not in args.recipes.split(","):
                continue
            kept = args.keep if name == SHIPPED else None
            started, target = time.monotonic(), kept or Path(scratch) / name
            with Checkpoint.open(args.source) as checkpoint:
                report = quantise_checkpoint(checkpoint, target, recipe, calibration, device=args.device)
            seconds = round(time.monotonic() - started, 1)
            measured = figures(expected, log_probabilities(target, texts), replies)
            figure = {"recipe": name, "bits": report.bits, "bytes": report.nbytes, "seconds": seconds}
            results.append(figure | measured)
            print(results[-1], flush=True)
            facts = {
                "command": f"python {' '.join(sys.argv)}",
                "hardware": "a CPU" if args.device == "cpu" else torch.cuda.get_device_name(),
                "held_out_tokens": sum(map(len, texts)),
                "reply_tokens": int(torch.cat(replies).sum()),
                "calibration_tokens": sum(map(len, calibration)),
                "results": results,
            }
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
