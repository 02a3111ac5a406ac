"""The tasks of tfglm.checks.python: what is asked, a reference, and inputs for its tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tfglm.checks.words import NOUNS


@dataclass(frozen=True)
class Task:
    name: str
    parameters: tuple[str, ...]
    what: str
    body: str
    inputs: Callable[[Random], list[Any]]


def _whole(rng: Random) -> int:
    return rng.randint(-99, 99)


def _list(rng: Random, longest: int = 12) -> list[int]:
    return [rng.randint(-20, 60) for _ in range(rng.randint(0, longest))]


def _words(rng: Random) -> str:
    return " ".join(rng.choice(NOUNS) for _ in range(rng.randint(0, 6)))


def _line(rng: Random) -> Task:
    """One expression."""
    k, n = rng.randint(2, 20), rng.randint(2, 9)
    numbers = lambda r: [_whole(r)]  # noqa: E731
    pairs = lambda r: [_whole(r), _whole(r)]  # noqa: E731
    lists = lambda r: [_list(r)]  # noqa: E731
    texts = lambda r: [_words(r)]  # noqa: E731
    parameters, what, expression, inputs = rng.choice((
        (("x",), f"x times {k}", f"x * {k}", numbers),
        (("x",), f"x plus {k}", f"x + {k}", numbers),
        (("x",), f"x minus {k}", f"x - {k}", numbers),
        (("x",), f"x times {n} plus {k}", f"x * {n} + {k}", numbers),
        (("x",), f"the square of x minus {k}", f"x * x - {k}", numbers),
        (("x",), f"the remainder of x divided by {k}", f"x % {k}", numbers),
        (("x",), f"whether {n} divides x", f"x % {n} == 0", lambda r: [n * r.randint(-9, 9) + r.choice((0, 0, 1, -1))]),
        (("x",), f"whether x is more than {k}", f"x > {k}", numbers),
        (("a", "b"), f"the sum of a and b times {k}", f"(a + b) * {k}", pairs),
        (("a", "b"), f"the larger of a and b plus {k}", f"max(a, b) + {k}", pairs),
        (("a", "b"), f"the smaller of a and b plus {k}", f"min(a, b) + {k}", pairs),
        (("s",), f"s repeated {n} times", f"s * {n}", texts),
        (("s",), f"the length of s plus {k}", f"len(s) + {k}", texts),
        (("s",), f"the first {n} letters of s", f"s[:{n}]", texts),
        (("s",), f"the last {n} letters of s", f"s[-{n}:]", texts),
        (("xs",), f"the sum of xs plus {k}", f"sum(xs) + {k}", lists),
        (("xs",), f"the first {n} items of xs", f"xs[:{n}]", lists),
        (("xs",), f"the items of xs that are more than {k}", f"[x for x in xs if x > {k}]", lists),
        (("xs",), f"the items of xs times {k}", f"[x * {k} for x in xs]", lists),
        (("xs",), f"how many items of xs are more than {k}", f"sum(x > {k} for x in xs)", lists),
    ))  # fmt: skip
    return Task("f", parameters, what, f"return {expression}", inputs)


def _loop(rng: Random) -> Task:
    """A few lines over a list or a text."""
    k = rng.randint(2, 9)
    name, parameters, what, body, inputs = rng.choice((
        ("count_words", ("s",),
         f"It returns how many words of s, separated by spaces, have more than {k // 3 + 4} letters.",
         f"return sum(len(word) > {k // 3 + 4} for word in s.split())", lambda r: [_words(r)]),
        ("every", ("xs",),
         f"It returns the items of xs at index {k - 1}, {2 * k - 1}, {3 * k - 1} and so on, the last one first.",
         f"return xs[{k - 1}::{k}][::-1]", lambda r: [_list(r, 30)]),
        ("digit_sum", ("n",), f"It returns the sum of the decimal digits of the absolute value of n, times {k}.",
         f"return sum(map(int, str(abs(n)))) * {k}", lambda r: [r.randint(-10**6, 10**6)]),
        ("chunks", ("xs",),
         f"It cuts xs into lists of {k} items, the last one shorter if need be, and returns their list.",
         f"return [xs[i:i + {k}] for i in range(0, len(xs), {k})]", lambda r: [_list(r, 30)]),
        ("tally", ("s",),
         f"It returns a dict from each letter of s that occurs at least {k // 3 + 2} times to its count; no spaces.",
         f"return {{c: s.count(c) for c in s if c != ' ' and s.count(c) >= {k // 3 + 2}}}", lambda r: [_words(r)]),
        ("closest", ("xs",),
         f"It returns the item of xs that is closest to {k}, the smaller of two as close, None if xs is empty.",
         f"return min(xs, key=lambda x: (abs(x - {k}), x)) if xs else None", lambda r: [_list(r)]),
    ))  # fmt: skip
    return Task(name, parameters, what, body, inputs)


def _steps(rng: Random, count: int) -> Task:
    """Operations on a list one after the other, then one number or the list."""
    a, b, c, d = rng.randint(-5, 25), rng.randint(2, 6), rng.randint(2, 4), rng.randint(3, 9)
    operations = [
        (f"drop the items below {a}", f"xs = [x for x in xs if x >= {a}]"),
        (f"multiply each item by {b}", f"xs = [x * {b} for x in xs]"),
        (f"keep one item in {c}, beginning with the first", f"xs = xs[::{c}]"),
        ("remove duplicates, keeping the first of each", "xs = list(dict.fromkeys(xs))"),
        ("sort in descending order", "xs = sorted(xs, reverse=True)"),
        ("replace each item by the sum of the items up to and including it",
         "xs = [sum(xs[:i + 1]) for i in range(len(xs))]"),
        (f"replace each item by its remainder modulo {d} (never negative)", f"xs = [x % {d} for x in xs]"),
        ("replace the list by the differences of neighbours, each item minus the one before it",
         "xs = [y - x for x, y in zip(xs, xs[1:])]"),
        (f"move the first {c} items to the end (none if there are fewer)",
         f"xs = xs[{c}:] + xs[:{c}] if len(xs) >= {c} else xs"),
        ("reverse it", "xs = xs[::-1]"),
    ]  # fmt: skip
    chosen = rng.sample(operations, count)
    what, last = rng.choice((
        ("return the list", "return xs"),
        ("return the sum", "return sum(xs)"),
        ("return the largest item, or None if there is none", "return max(xs, default=None)"),
        ("return how many items are left", "return len(xs)"),
    ))  # fmt: skip
    told = "; ".join(text for text, _ in chosen)
    body = "\n".join([*(line for _, line in chosen), last])
    return Task("process", ("xs",), f"With the list of integers xs it does this in order: {told}; {what}.", body,
                lambda r: [_list(r, 20)])  # fmt: skip


def _runs(rng: Random) -> Task:
    k = rng.randint(2, 4)
    return Task(
        "pack", ("s",),
        f"It packs runs: each run of at least {k} equal characters becomes its length followed by the character, "
        "shorter runs stay as they are. It returns the packed text.",
        "import itertools\nout = []\nfor c, run in itertools.groupby(s):\n    n = len(list(run))\n"
        f"    out.append(f'{{n}}{{c}}' if n >= {k} else c * n)\nreturn ''.join(out)",
        lambda r: ["".join(r.choice("abc") * r.randint(1, 6) for _ in range(r.randint(0, 8)))],
    )  # fmt: skip


def _merge(rng: Random) -> Task:
    gap = rng.randint(1, 5)
    return Task(
        "merge", ("spans",),
        "spans is a list of [start, end] pairs of integers in any order. It merges spans that overlap, touch, or are "
        f"at most {gap} apart (start of one minus end of the other), and returns the merged [start, end] lists in "
        "order.",
        f"out = []\nfor start, end in sorted(spans):\n    if out and start - out[-1][1] <= {gap}:\n"
        "        out[-1][1] = max(out[-1][1], end)\n    else:\n        out.append([start, end])\nreturn out",
        lambda r: [[[a, a + r.randint(0, 9)] for a in (r.randint(0, 80) for _ in range(r.randint(0, 9)))]],
    )  # fmt: skip


def _brackets(rng: Random) -> Task:
    k = rng.randint(2, 4)
    return Task(
        "balanced", ("s",),
        "It returns whether the brackets ()[]{} of s are balanced and properly nested, and nested at most "
        f"{k} deep; other characters are ignored.",
        "stack = []\nfor c in s:\n    if c in '([{':\n        stack.append(c)\n"
        f"        if len(stack) > {k}:\n            return False\n    elif c in ')]}}':\n"
        "        if not stack or stack.pop() + c not in ('()', '[]', '{}'):\n            return False\n"
        "return not stack",
        lambda r: [_bracketed(r, r.randint(0, 5)) + r.choice(["", "", "", ")", "["])],
    )  # fmt: skip


def _bracketed(rng: Random, depth: int) -> str:
    opening, closing = rng.choice(("()", "[]", "{}"))
    inner = _bracketed(rng, depth - 1) if depth > 0 else rng.choice(("", "x"))
    return opening + inner + closing + (_bracketed(rng, 0) if rng.random() < 0.4 else "")


def _machine(rng: Random) -> Task:
    k = rng.randint(2, 9)
    return Task(
        "machine", ("program",),
        "program is a text of commands separated by spaces for a stack of integers: a number pushes itself; + - * pop "
        "b, then a, and push a + b, a - b or a * b; dup pushes the top again; swap exchanges the two topmost; "
        f"twist pops the top and pushes it times {k} plus the number of items then left below it. A command that finds "
        "too few items does nothing at all. It returns the stack as a list, top last.",
        "stack = []\nfor word in program.split():\n    if word in '+-*':\n        if len(stack) >= 2:\n"
        "            b, a = stack.pop(), stack.pop()\n"
        "            stack.append(a + b if word == '+' else a - b if word == '-' else a * b)\n"
        "    elif word == 'dup':\n        stack += stack[-1:]\n    elif word == 'swap':\n        if len(stack) >= 2:\n"
        "            stack[-2:] = stack[:-3:-1]\n    elif word == 'twist':\n        if stack:\n"
        f"            a = stack.pop()\n            stack.append(a * {k} + len(stack))\n    else:\n"
        "        stack.append(int(word))\nreturn stack",
        lambda r: [" ".join(_command(r) for _ in range(r.randint(0, 14)))],
    )  # fmt: skip


def _command(rng: Random) -> str:
    return rng.choice(("+", "-", "*", "dup", "swap", "twist")) if rng.random() < 0.5 else str(rng.randint(-9, 9))


def _grid(rng: Random) -> Task:
    fee = rng.randint(1, 6)
    return Task(
        "cheapest", ("grid",),
        "grid is a list of rows of equal length with costs >= 0, or -1 for a wall. A path goes from the top left to "
        "the bottom right cell by steps up, down, left and right; it costs the sum of its cells, both ends included, "
        "plus "
        f"{fee} for every change of direction. It returns the least cost, or -1 if there is no path.",
        "import heapq\nh, w = len(grid), len(grid[0])\nif grid[0][0] < 0:\n    return -1\n"
        "queue, seen = [(grid[0][0], 0, 0, -1)], set()\nmoves = ((0, 1), (1, 0), (0, -1), (-1, 0))\nwhile queue:\n"
        "    cost, y, x, last = heapq.heappop(queue)\n    if (y, x) == (h - 1, w - 1):\n        return cost\n"
        "    if (y, x, last) in seen:\n        continue\n    seen.add((y, x, last))\n"
        "    for way, (dy, dx) in enumerate(moves):\n        v, u = y + dy, x + dx\n"
        "        if 0 <= v < h and 0 <= u < w and grid[v][u] >= 0:\n"
        f"            turn = {fee} if last not in (-1, way) else 0\n"
        "            heapq.heappush(queue, (cost + grid[v][u] + turn, v, u, way))\nreturn -1",
        _random_grid,
    )  # fmt: skip


def _random_grid(rng: Random) -> list[Any]:
    height, width = rng.randint(1, 6), rng.randint(1, 6)
    return [[[-1 if rng.random() < 0.2 else rng.randint(0, 9) for _ in range(width)] for _ in range(height)]]


def _cache(rng: Random) -> Task:
    capacity = rng.randint(2, 4)
    return Task(
        "misses", ("keys",),
        f"It simulates a cache of {capacity} entries that is asked for each of keys (a list of integers) in order and "
        "returns the list of the keys that were not in it when asked. A missing key is added; if the cache is full, "
        "the entry asked for least often since it was added is dropped first, among equals the one whose last use is "
        "longest ago. Asking for a missing key counts as its first use.",
        "cache, out = {}, []\nfor now, key in enumerate(keys):\n    if key in cache:\n"
        "        cache[key] = (cache[key][0] + 1, now)\n        continue\n    out.append(key)\n"
        f"    if len(cache) == {capacity}:\n        del cache[min(cache, key=cache.get)]\n"
        "    cache[key] = (1, now)\nreturn out",
        lambda r: [[r.randint(1, 7) for _ in range(r.randint(0, 30))]],
    )  # fmt: skip


def _evaluate(rng: Random) -> Task:
    return Task(
        "evaluate", ("s",),
        "s is an expression of integers without sign, + and *, round brackets and spaces, in which + binds more "
        "tightly than * (so 2 * 3 + 4 is 14). It returns its value. Do not use eval.",
        "tokens = s.replace('(', ' ( ').replace(')', ' ) ').replace('+', ' + ').replace('*', ' * ').split()\n\n"
        "def product():\n    value = total()\n    while tokens and tokens[0] == '*':\n        tokens.pop(0)\n"
        "        value *= total()\n    return value\n\ndef total():\n    value = atom()\n"
        "    while tokens and tokens[0] == '+':\n        tokens.pop(0)\n        value += atom()\n    return value\n\n"
        "def atom():\n    token = tokens.pop(0)\n    if token != '(':\n        return int(token)\n"
        "    value = product()\n"
        "    tokens.pop(0)\n    return value\n\nreturn product()",
        lambda r: [_expression(r, r.randint(0, 3))],
    )  # fmt: skip


def _expression(rng: Random, depth: int) -> str:
    def atom() -> str:
        return str(rng.randint(0, 30)) if depth == 0 or rng.random() < 0.4 else f"({_expression(rng, depth - 1)})"

    return atom() + "".join(rng.choice((" + ", " * ", "+", "*")) + atom() for _ in range(rng.randint(0, 3)))


LEVELS: tuple[tuple[Callable[[Random], Task], ...], ...] = (
    (_line,),
    (_loop,),
    (lambda rng: _steps(rng, 3),),
    (lambda rng: _steps(rng, 6), _runs, _merge, _brackets),
    (_machine, _grid, _cache, _evaluate),
)
