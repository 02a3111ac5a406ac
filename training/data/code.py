"""Very small Python functions: written to a description, and read for what they return."""

from __future__ import annotations

from random import Random

from training.data.exchange import Exchange, pick

_LISTS = ("numbers", "values", "items", "xs")

_KNOWN = (
    (
        "Write a Python fibonacci function.",
        "fibonacci",
        "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a\n",
    ),
    ("Write a Python function that merges two sorted lists.", "merge", "def merge(a, b):\n    return sorted(a + b)\n"),
    (
        "Write a function that computes the factorial of n.",
        "factorial",
        "def factorial(n):\n    result = 1\n"
        "    for i in range(2, n + 1):\n        result = result * i\n    return result\n",
    ),
    (
        "Write a function that checks whether n is prime.",
        "is_prime",
        "def is_prime(n):\n    if n < 2:\n        return False\n"
        "    for i in range(2, n):\n        if n % i == 0:\n            return False\n    return True\n",
    ),
    (
        "Write a function that checks whether a text is a palindrome.",
        "is_palindrome",
        "def is_palindrome(text):\n    return text == text[::-1]\n",
    ),
    (
        "Write a function that counts the vowels of a text.",
        "count_vowels",
        "def count_vowels(text):\n    return sum(1 for c in text if c in 'aeiou')\n",
    ),
    (
        "Write a function that computes the greatest common divisor of a and b.",
        "gcd",
        "def gcd(a, b):\n    while b:\n        a, b = b, a % b\n    return a\n",
    ),
    ("Write hello world in Python.", "", "print('Hello, world!')\n"),
)


def known(rng: Random) -> Exchange:
    ask, name, code = rng.choice(_KNOWN)
    return Exchange(ask, f"The function is called {name}." if name else "One line.", f"```python\n{code}```")


def _expression(rng: Random) -> tuple[str, str, str]:
    """What is asked for of x, its expression, a name."""
    n = rng.randint(2, 20)
    return rng.choice(
        (
            (f"adds {n} to x", f"x + {n}", f"add_{n}"),
            (f"multiplies x by {n}", f"x * {n}", f"times_{n}"),
            (f"subtracts {n} from x", f"x - {n}", f"minus_{n}"),
            (f"says whether x is larger than {n}", f"x > {n}", f"above_{n}"),
            ("returns the square of x", "x * x", "square"),
            ("doubles x", "2 * x", "double"),
            ("says whether x is even", "x % 2 == 0", "is_even"),
            ("says whether x is odd", "x % 2 == 1", "is_odd"),
            (f"returns the remainder of x divided by {n}", f"x % {n}", f"mod_{n}"),
            (f"doubles x and adds {n}", f"2 * x + {n}", "double_and_add"),
            (f"says whether x can be divided by {n}", f"x % {n} == 0", f"divides_{n}"),
        )
    )


def _over_list(rng: Random) -> tuple[str, str, str]:
    xs, n = rng.choice(_LISTS), rng.randint(2, 30)
    return rng.choice(
        (
            (f"returns the sum of the list {xs}", f"sum({xs})", "total"),
            (f"returns the largest of the list {xs}", f"max({xs})", "largest"),
            (f"returns the smallest of the list {xs}", f"min({xs})", "smallest"),
            (f"returns the list {xs} in reverse order", f"{xs}[::-1]", "backwards"),
            (f"returns the length of the list {xs}", f"len({xs})", "length"),
            (f"sorts the list {xs}", f"sorted({xs})", "ordered"),
            (f"returns the even numbers of the list {xs}", f"[x for x in {xs} if x % 2 == 0]", "evens"),
            (f"returns the numbers of the list {xs} that are above {n}", f"[x for x in {xs} if x > {n}]", "above"),
            (f"adds {n} to every number of the list {xs}", f"[x + {n} for x in {xs}]", "shifted"),
            (f"multiplies every number of the list {xs} by {n}", f"[x * {n} for x in {xs}]", "scaled"),
            (
                f"counts how many numbers of the list {xs} are above {n}",
                f"sum(1 for x in {xs} if x > {n})",
                "count_above",
            ),
            (f"returns the first and the last of the list {xs}", f"{xs}[0], {xs}[-1]", "ends"),
            (f"returns the squares of the list {xs}", f"[x * x for x in {xs}]", "squares"),
        )
    )


def write(rng: Random) -> Exchange:
    if rng.random() < 0.45:
        what, expression, name = _expression(rng)
        argument = "x"
    else:
        what, expression, name = _over_list(rng)
        argument = what.split("list ")[1].split()[0]
    if rng.random() < 0.4:
        name = pick(rng, "f", "solve", "compute", "change", "result", "task", "answer")
        ask = pick(
            rng,
            f"Write a Python function {name}({argument}) that {what}.",
            f"Write {name}({argument}), a function that {what}.",
        )
    else:
        ask = pick(
            rng,
            f"Write a Python function `{name}({argument})` that {what}.",
            f"Write a function called {name} that {what}.",
            f"Python: {name}({argument}) {what}.",
        )
    code = f"```python\ndef {name}({argument}):\n    return {expression}\n```"
    return Exchange(ask, f"{name} returns {expression}.", code)


def read(rng: Random) -> Exchange:
    """What a function returns for one number."""
    n, m, x = rng.randint(2, 9), rng.randint(1, 30), rng.randint(1, 20)
    form = rng.randrange(4)
    if form == 0:
        body, steps, value = (
            f"    return x * {n} + {m}\n",
            [f"{x} * {n} = {x * n}", f"{x * n} + {m} = {x * n + m}"],
            x * n + m,
        )
    elif form == 1:
        body, steps, value = (
            f"    y = x + {m}\n    return y * {n}\n",
            [f"y = {x} + {m} = {x + m}", f"{x + m} * {n} = {(x + m) * n}"],
            (x + m) * n,
        )
    elif form == 2:
        big = x > m
        value = x - m if big else m - x
        body = f"    if x > {m}:\n        return x - {m}\n    return {m} - x\n"
        steps = [f"{x} > {m} is {big}", f"{x} - {m} = {value}" if big else f"{m} - {x} = {value}"]
    else:
        k = rng.randint(2, 5)
        body, value, steps = f"    for _ in range({k}):\n        x = x + {n}\n    return x\n", x, []
        for _ in range(k):
            steps.append(f"{value} + {n} = {value + n}")
            value += n
    ask = pick(rng, f"What does f({x}) return?", f"What is f({x})?", f"Run f({x}) in your head. What comes out?")
    prompt = f"```python\ndef f(x):\n{body}```\n{ask}" if rng.random() < 0.7 else f"{ask}\n\ndef f(x):\n{body}"
    return Exchange(prompt, "\n".join(steps), str(value), "\n".join([*steps, str(value)]))
