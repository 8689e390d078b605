"""Stages one after another, and the report of what became of them. Needs no torch."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TAIL_LINES = 30  # of the log of a stage that failed
LEFT_OUT = 3  # status of a stage that did not run and printed why: no failure, and no pass


@dataclass(frozen=True)
class Stage:
    """A part of the run.

    Attributes
    ----------
    name
        Of its log.
    title
        What the report calls it.
    command
        Its process. The lines that it prints on stdout are its part of the report; a status other
        than 0 and LEFT_OUT is a failure.
    seconds
        When it is stopped.
    required
        Whether nothing runs after its failure.
    """

    name: str
    title: str
    command: Sequence[str]
    seconds: float
    required: bool = False


@dataclass
class _Outcome:
    stage: Stage
    status: str = "not run"
    lines: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        return self.status.startswith(("passed", "left out"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a stage and what it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _run(stage: Stage, logs: Path, seconds: float) -> _Outcome:
    """Run a stage for so many seconds at most."""
    printed, log = logs / f"{stage.name}.md", logs / f"{stage.name}.log"
    start = time.monotonic()
    with printed.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(
            stage.command, stdout=stdout, stderr=stderr, start_new_session=True
        )
        try:
            process.wait(seconds)
            code = process.returncode
            if code == 0:
                status = "passed"
            elif code == LEFT_OUT:
                status = "left out"
            elif code < 0:
                status = f"FAILED: ended by {signal.Signals(-code).name}"
            else:
                status = f"FAILED: status {code}"
        except subprocess.TimeoutExpired:
            status = "STOPPED: its time was up"
        finally:
            _stop(process)
    status += f", after {time.monotonic() - start:.0f} s"
    lines = printed.read_text(errors="replace").splitlines()
    outcome = _Outcome(stage, status, lines)
    if not outcome.is_fine:
        outcome.log = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return outcome


def _text(title: str, outcomes: Sequence[_Outcome]) -> str:
    lines = [f"# {title}", "", f"{datetime.date.today()}.", ""]
    lines += [f"- {outcome.stage.title}: {outcome.status}" for outcome in outcomes]
    for outcome in outcomes:
        if outcome.lines or outcome.log:
            lines += ["", f"## {outcome.stage.title}", "", *outcome.lines]
        if outcome.log:
            lines += ["", "The end of what it said:", "", "```", *outcome.log, "```"]
    return "\n".join(lines) + "\n"


def run_stages(
    title: str, stages: Sequence[Stage], report: Path, logs: Path, seconds: float
) -> bool:
    """Run stages, and write the report before the first and after each.

    Parameters
    ----------
    title
        Of the report.
    stages
        In their order.
    report
        File to write.
    logs
        Folder of what each stage printed.
    seconds
        For all of them.

    Returns
    -------
    bool
        Whether every stage passed, or was left out and said why.
    """
    end = time.monotonic() + seconds
    logs.mkdir(parents=True, exist_ok=True)
    report.parent.mkdir(parents=True, exist_ok=True)
    outcomes = [_Outcome(stage) for stage in stages]
    report.write_text(_text(title, outcomes))
    reason = ""
    for number, stage in enumerate(stages):
        left = end - time.monotonic()
        if left <= 0:
            reason = "the time was up"
        if reason:
            outcomes[number].status = f"NOT RUN: {reason}"
        else:
            print(f"{stage.title} ...", file=sys.stderr, flush=True)
            outcomes[number] = _run(stage, logs, min(stage.seconds, left))
            print(f"  {outcomes[number].status}", file=sys.stderr, flush=True)
            if stage.required and not outcomes[number].is_fine:
                reason = f"{stage.title}: {outcomes[number].status}"
        report.write_text(_text(title, outcomes))
    return all(outcome.is_fine for outcome in outcomes)
