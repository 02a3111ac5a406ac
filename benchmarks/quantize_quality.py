"""Quality of `tfglm quantize` by width on a small random model: KL divergence and perplexity against BF16.

    python benchmarks/quantize_quality.py [--out benchmarks/results/quantize_quality.json]

Calibrated on the built-in text, measured on text it does not hold (this program's own sources). Perplexity is that of
text drawn from the BF16 model: exp(cross-entropy of the BF16 distribution under the quantised one).
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from pathlib import Path

import torch

from tfglm.checkpoint.store import Checkpoint
from tfglm.checkpoint.synth import write_checkpoint
from tfglm.engine.tokenizer import Tokenizer
from tfglm.models.load import load_model
from tfglm.models.window import Rows
from tfglm.quantize.recipe import Recipe
from tfglm.quantize.run import quantise_checkpoint
from tfglm.quantize.text import conversations, sequences
from tfglm.server.template import ChatTemplate

MODEL = {
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "moe_intermediate_size": 128,
    "num_nextn_predict_layers": 0,
}
RECIPES = {
    "2": Recipe(2, (2.0,)),
    "2.5 mul1": Recipe(2.5, (2.5,), "mul1"),
    "2.75 of 2, 3, 4": Recipe(2.75, (2.0, 3.0, 4.0)),
    "3": Recipe(3, (3.0,)),
    "4": Recipe(4, (4.0,)),
}
HELD_OUT_TOKENS = 2048


def log_probabilities(folder: Path, tokens: list[int]) -> torch.Tensor:
    """float64 [tokens, vocabulary], in windows of 512 tokens that start anew."""
    rows = []
    with Checkpoint.open(folder) as checkpoint:
        model = load_model(checkpoint, tokens=512, kv="fp32")
    for start in range(0, len(tokens), 512):
        stream, part = model.open_stream(), tokens[start : start + 512]
        rows.append(torch.log_softmax(model.forward([Rows(stream, part, len(part))]).double(), dim=1))
        stream.close()
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quantize_quality.json"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where to quantise; the measuring is done on the CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        write_checkpoint(source, "tiny", args.seed, **MODEL)
        tokenizer, template = Tokenizer.from_folder(source), ChatTemplate.from_folder(source)
        held_out = "".join(file.read_text() for file in sorted(Path("tfglm/engine").glob("*.py")))
        tokens = tokenizer.encode(held_out)[:HELD_OUT_TOKENS]
        calibration = sequences(
            conversations(None),
            lambda messages: template.render(messages, add_generation_prompt=False),
            tokenizer.encode,
            length=512,
            tokens=8192,
        )
        expected = log_probabilities(source, tokens)
        entropy = -float((expected.exp() * expected).sum(dim=1).mean())
        results = []
        for name, recipe in RECIPES.items():
            started, target = time.monotonic(), Path(scratch) / name
            with Checkpoint.open(source) as checkpoint:
                report = quantise_checkpoint(checkpoint, target, recipe, calibration, device=args.device)
            found = log_probabilities(target, tokens)
            divergence = (expected.exp() * (expected - found)).sum(dim=1)
            kl = float(divergence.mean())
            results.append(
                {
                    "recipe": name,
                    "bits": report.bits,
                    "kl": kl,
                    "kl_median": float(divergence.median()),
                    "perplexity": float(torch.tensor(entropy + kl).exp()),
                    "proxy_error": sum(layer.proxy_error for layer in report.layers) / len(report.layers),
                    "seconds": time.monotonic() - started,
                }
            )
            print(results[-1], flush=True)
    kl_of = {result["recipe"]: result["kl"] for result in results}
    line = 0.25 * kl_of["2"] + 0.75 * kl_of["3"]
    print(f"2.75 mixed: {kl_of['2.75 of 2, 3, 4']:.5f}; the straight line between 2 and 3: {line:.5f}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    facts = {
        "command": f"python {' '.join(sys.argv)}",
        "hardware": f"{platform.machine()}, {torch.get_num_threads()} threads, quantised on {args.device}",
        "model": MODEL,
        "seed": args.seed,
        "calibration_tokens": sum(map(len, calibration)),
        "held_out_tokens": len(tokens),
        "perplexity_of_bf16": float(torch.tensor(entropy).exp()),
        "line_at_2.75": line,
        "results": results,
    }
    args.out.write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
