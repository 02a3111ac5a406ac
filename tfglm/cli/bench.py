"""`tfglm bench drafts TRACE`: what a trace of drafts is worth under the policy and under every fixed length."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tfglm.errors import ConfigError

if TYPE_CHECKING:
    from tfglm.drafts.costs import Costs


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bench", help="measure", description="Measure something that can be repeated.")
    kinds = parser.add_subparsers(dest="kind", metavar="WHAT", required=True)
    drafts = kinds.add_parser(
        "drafts",
        help="replay a trace of drafts under every policy",
        description="Replay a trace, written by `tfglm serve PATH --draft-trace TRACE`, under the policy that serves "
        "and under every fixed draft length. Needs no model: a table of costs is the clock, by default the published "
        "one of GLM-5.3 on three DGX Sparks.",
    )
    drafts.add_argument("trace", type=Path, metavar="TRACE")
    drafts.add_argument("--verify-ms", metavar="MS,MS,...", help="milliseconds of a window of 1, 2, ... rows")
    drafts.add_argument("--first-ms", type=float, metavar="MS", help="milliseconds of a model's first draft of a round")
    drafts.add_argument("--next-ms", type=float, metavar="MS", help="milliseconds of each draft after the first")
    drafts.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tfglm.drafts.policy import Policy
    from tfglm.drafts.trace import FixedPolicy, read_trace, replay

    trace, costs = read_trace(args.trace), _costs(args)
    replies = len(trace.replies)
    print(f"{args.trace}: {replies} replies, drafted by {trace.drafter} (at most {trace.most} tokens a round)")
    print(f"{'policy':24} {'tok/round':>10} {'drafted':>8} {'accepted':>9} {'tok/s':>8}")
    for copy in (False, True):
        policies = [(f"fixed {length}", FixedPolicy(costs, length)) for length in range(max(trace.most, 1) + 1)]
        rates = []
        for name, policy in [*policies, ("policy", Policy(costs))]:
            done = replay(trace, policy, copy=copy)
            rates.append(done.tokens_per_second)
            label = name + (" with copies" if copy else "")
            share = done.accepted / done.drafted if done.drafted else 0.0
            print(
                f"{label:24} {done.tokens_per_round:10.3f} {done.drafted:8} {share:9.1%} {done.tokens_per_second:8.2f}"
            )
        regret = 1 - rates[-1] / max(rates[:-1]) if max(rates[:-1]) else 0.0
        print(f"policy against the best fixed length: {-regret:+.1%}")
    return 0


def _costs(args: argparse.Namespace) -> Costs:
    from tfglm.drafts.costs import THREE_SPARKS, Costs

    verify = THREE_SPARKS.verify_ms
    if args.verify_ms:
        try:
            verify = tuple(float(part) for part in args.verify_ms.split(","))
        except ValueError:
            verify = ()
        if not verify or not all(0 < ms < float("inf") for ms in verify) or list(verify) != sorted(verify):
            raise ConfigError(f"--verify-ms is {args.verify_ms!r}; it takes positive, non-decreasing numbers: 52,64,75")
    first = THREE_SPARKS.first_ms if args.first_ms is None else args.first_ms
    return Costs(verify, first, args.next_ms or 0.0)
