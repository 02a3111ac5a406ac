"""Results as tables for people, and as one JSON object for everything else."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from tfglm.checks.compare import Pairs, pairs
from tfglm.checks.lengths import Placed
from tfglm.checks.problem import Json, same
from tfglm.checks.run import Result

FAILURES = ("wrong", "outdated", "invalid", "cut")


@dataclass(frozen=True)
class Tally:
    """`asked` are problems that got a reply; `errors` those that got none."""

    asked: int
    score: float
    outcomes: Counter[str]
    errors: int
    tokens: int

    @property
    def share(self) -> float | None:
        return self.score / self.asked if self.asked else None

    def as_json(self) -> Json:
        return {
            "answered": self.asked,
            "right": self.outcomes["right"],
            "score": None if self.share is None else round(self.share, 6),
            **{name: self.outcomes[name] for name in FAILURES},
            "errors": self.errors,
            "completion_tokens": self.tokens,
        }


def tally(results: Iterable[Result]) -> Tally:
    listed = list(results)
    graded = [result.grade for result in listed if result.grade is not None]
    return Tally(
        asked=len(graded),
        score=sum(grade.score for grade in graded),
        outcomes=Counter(grade.outcome for grade in graded),
        errors=len(listed) - len(graded),
        tokens=sum(result.reply.completion_tokens for result in listed if result.reply is not None),
    )


def percent(share: float | None) -> str:
    """For a column that says it is in percent."""
    return "–" if share is None else f"{100 * share:.1f}"


def _cell(found: Tally) -> str:
    return f"{found.outcomes['right']}/{found.asked}" if found.asked else "–"


def _table(title: str, *columns: str, names: int = 1) -> Table:
    """The first `names` columns are text, the others figures."""
    # Without lines between columns the widest table fits 80 columns.
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    for at, column in enumerate(columns):
        table.add_column(column, justify="left" if at < names else "right", no_wrap=True)
    return table


def quality_table(title: str, results: Sequence[Result]) -> Table:
    """A line a category, a column a level."""
    levels = sorted({result.problem.level for result in results})
    shown = levels if len(levels) > 1 else []
    failures = [kind for kind in FAILURES if kind != "outdated"]  # only needles have it
    table = _table(title, "", *(f"L{level}" for level in shown), "right", "%", *failures, "errors")
    groups = list(dict.fromkeys(result.problem.category for result in results))
    for name in [*groups, None] if len(groups) > 1 else groups:
        mine = [result for result in results if name in (None, result.problem.category)]
        whole = tally(mine)
        cells = [_cell(tally(result for result in mine if result.problem.level == level)) for level in shown]
        if name is None:
            table.add_section()
        counts = [str(whole.outcomes[kind]) for kind in failures]
        table.add_row(name or "all", *cells, _cell(whole), percent(whole.share), *counts, str(whole.errors))
    return table


def comparison(a: Sequence[Result], b: Sequence[Result]) -> dict[str, Pairs]:
    """By category, and `all`."""
    names = list(dict.fromkeys(result.problem.category for result in a))
    found = {
        name: pairs([x for x in a if x.problem.category == name], [x for x in b if x.problem.category == name])
        for name in names
    }
    return found | {"all": pairs(a, b)}


def comparison_table(found: dict[str, Pairs]) -> Table:
    columns = ("", "A right", "B right", "both", "only A", "only B", "neither", "left out", "p")
    table = _table("A against B, p by the exact two-sided McNemar test", *columns)
    for name, row in found.items():
        if name == "all":
            table.add_section()
        counts = (row.both, row.only_a, row.only_b, row.neither, row.left_out)
        p = f"{row.p:.4f}" if row.p >= 1e-4 else "< 0.0001"
        table.add_row(
            name, f"{row.both + row.only_a}/{row.compared}", f"{row.both + row.only_b}/{row.compared}",
            *map(str, counts), p,
        )  # fmt: skip
    return table


def comparison_json(found: dict[str, Pairs]) -> Json:
    return {
        name: {"both": row.both, "only_a": row.only_a, "only_b": row.only_b, "neither": row.neither,
               "left_out": row.left_out, "p": row.p}
        for name, row in found.items()
    }  # fmt: skip


def keys_of(results: Iterable[Result]) -> Counter[str]:
    """Keys by outcome; a recall counts each of its keys."""
    found: Counter[str] = Counter()
    for result in results:
        if result.grade is not None:
            found.update(dict(result.grade.counts or ((result.grade.outcome, 1),)))
    return found


def needle_table(title: str, placed: Sequence[Placed], results: Sequence[Result]) -> Table:
    """A line a length and kind, counted in keys. `missing`: no value was given."""
    columns = ("length", "kind", "prompt", "right", "%", "outdated", "wrong", "missing", "errors", "missed at %")
    table = _table(title, *columns, names=2)
    rows = list(dict.fromkeys((item.length, item.problem.kind) for item in placed))
    for at, (length, kind) in enumerate(sorted(rows, key=lambda row: row[0])):
        mine = [
            (item, result)
            for item, result in zip(placed, results, strict=True)
            if (item.length, item.problem.kind) == (length, kind)
        ]
        keys = keys_of(result for _, result in mine)
        asked = keys.total()
        prompts = [result.reply.prompt_tokens for _, result in mine if result.reply is not None]
        missed = [f"{100 * item.depth:.0f}" for item, x in mine if x.grade and not x.right and item.depth is not None]
        if at and length != sorted(rows)[at - 1][0]:
            table.add_section()
        table.add_row(
            str(length), kind, str(round(sum(prompts) / len(prompts))) if prompts else "–",
            f"{keys['right']}/{asked}", percent(keys["right"] / asked if asked else None), str(keys["outdated"]),
            str(keys["wrong"]), str(keys["missing"] + keys["invalid"] + keys["cut"]),
            str(sum(result.grade is None for _, result in mine)), " ".join(missed),
        )  # fmt: skip
    return table


def streamed_alike(whole: Result, streamed: Result) -> bool | None:
    """Whether both replies make the same calls; None if one of them is missing."""
    if whole.reply is None or streamed.reply is None:
        return None
    a, b = whole.reply.calls, streamed.reply.calls
    return len(a) == len(b) and all(
        x.name == y.name and same(_arguments(x.arguments), _arguments(y.arguments)) for x, y in zip(a, b, strict=True)
    )


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def tools_table(title: str, whole: Sequence[Result], streamed: Sequence[Result]) -> Table:
    """A line a kind; the failures are those of both ways of asking."""
    table = _table(title, "", "whole", "streamed", "%", "same calls", "wrong", "invalid", "cut", "errors")
    kinds = list(dict.fromkeys(result.problem.kind for result in whole))
    for name in [*kinds, None]:
        at = [n for n, result in enumerate(whole) if name in (None, result.problem.kind)]
        one, other = tally(whole[n] for n in at), tally(streamed[n] for n in at)
        both = tally([*(whole[n] for n in at), *(streamed[n] for n in at)])
        alike = [streamed_alike(whole[n], streamed[n]) for n in at]
        if name is None:
            table.add_section()
        table.add_row(
            name or "all", _cell(one), _cell(other), percent(both.share),
            f"{alike.count(True)}/{len(alike) - alike.count(None)}",
            *(str(both.outcomes[kind]) for kind in ("wrong", "invalid", "cut")), str(both.errors),
        )  # fmt: skip
    return table


def error_lines(results: Iterable[Result]) -> list[str]:
    """Each error once, with how often it came."""
    found = Counter(result.error for result in results if result.error)
    return [f"{count} × {text}" for text, count in found.most_common()]
