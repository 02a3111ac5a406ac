"""Two servers on the same problems: the exact two-sided McNemar test.

Only problems that one server got right and the other did not say anything about which is better. If neither is,
each of these n falls to either side with probability 1/2, so p is twice the tail of the binomial distribution at
the smaller count, at most 1. (McNemar, "Note on the sampling error of the difference between correlated
proportions", 1947.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tfglm.checks.run import Result


def mcnemar(only_a: int, only_b: int) -> float:
    """The p-value of two counts of discordant pairs."""
    n, ways, tail = only_a + only_b, 1, 0
    for k in range(min(only_a, only_b) + 1):
        tail += ways
        ways = ways * (n - k) // (k + 1)  # n over k + 1; always whole
    return min(1.0, 2 * tail / 2**n)


@dataclass(frozen=True)
class Pairs:
    """How often both, one or none of two servers were right; `left_out`: problems that one of them did not answer."""

    both: int
    only_a: int
    only_b: int
    neither: int
    left_out: int

    @property
    def compared(self) -> int:
        return self.both + self.only_a + self.only_b + self.neither

    @property
    def p(self) -> float:
        return mcnemar(self.only_a, self.only_b)


def pairs(a: Sequence[Result], b: Sequence[Result]) -> Pairs:
    """Results of the same problems in the same order. Raises ValueError if they are not."""
    if [result.problem.id for result in a] != [result.problem.id for result in b]:
        raise ValueError("the results are not of the same problems")
    answered = [(x.right, y.right) for x, y in zip(a, b, strict=True) if x.grade is not None and y.grade is not None]
    return Pairs(
        both=answered.count((True, True)),
        only_a=answered.count((True, False)),
        only_b=answered.count((False, True)),
        neither=answered.count((False, False)),
        left_out=len(a) - len(answered),
    )
