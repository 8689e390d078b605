"""Goals: bounds on a figure of some cases, judged on the worst of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lmdecode
from benchmarks.harness import OURS, Result


@dataclass(frozen=True)
class Goal:
    """A bound on a figure.

    Attributes
    ----------
    name
        Of the cases it speaks of.
    caches
        Of the cases it speaks of.
    peer
        What ours is compared with, in words.
    direction
        "at most" or "at least".
    bound
        The figure to reach.
    figure
        Result to figure; None where it was not measured.
    conditions
        All must hold for a case to count.
    unit
        Of the figure; "x" for a ratio.
    with_tiles
        True: it speaks of processors whose matrix units are used, level ``amx``, alone; False: of
        the others alone; None: of all.
    """

    name: str
    caches: str
    peer: str
    direction: str
    bound: float
    figure: Callable[[Result], float | None]
    conditions: Sequence[Callable[[Result], bool]] = ()
    unit: str = "x"
    with_tiles: bool | None = None


@dataclass(frozen=True)
class GoalOutcome:
    """A goal, the worst and the best figure, and where the worst was; None: not measured."""

    goal: Goal
    cases: int
    worst: float | None = None
    best: float | None = None
    where: Result | None = None

    @property
    def met(self) -> bool | None:
        """Whether the worst figure reaches the bound."""
        if self.worst is None:
            return None
        if self.goal.direction == "at most":
            return self.worst <= self.goal.bound
        return self.worst >= self.goal.bound

    @property
    def ours_us(self) -> float | None:
        """Time of ours in the worst case."""
        return self.where.microseconds(OURS) if self.where is not None else None


def evaluate(goals: Sequence[Goal], results: Sequence[Result]) -> list[GoalOutcome]:
    """Judge each goal that speaks of this processor on the results."""
    outcomes = []
    here = (None, lmdecode.cpu_capability() == "amx")
    for goal in (goal for goal in goals if goal.with_tiles in here):
        figures = [
            (figure, number)
            for number, result in enumerate(results)
            if result.case.name == goal.name
            and result.case.caches == goal.caches
            and all(condition(result) for condition in goal.conditions)
            and (figure := goal.figure(result)) is not None
        ]
        if not figures:
            outcomes.append(GoalOutcome(goal, 0))
            continue
        low, high = min(figures), max(figures)
        worst, best = (high, low) if goal.direction == "at most" else (low, high)
        outcomes.append(GoalOutcome(goal, len(figures), worst[0], best[0], results[worst[1]]))
    return outcomes
