"""Transcribers side by side: seconds, and words wrong, of lmdecode, faster-whisper, transformers.

    python -m benchmarks.transcriber MODEL [MODEL ...] [--faster-whisper PYTHON] [--transformers]

Each model is a folder of CTranslate2, or one of those that packages carry. The peers have a process
each, and take turns, case by case and round by round. espeak-ng speaks the sentences.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.quality.real_models import WHISPER_MODELS, find
from benchmarks.quality.speech import (
    RATE,
    WHY_NOT,
    can_speak,
    sentences,
    speak,
    word_error_rate,
    words,
)
from benchmarks.report import machine_line
from lmdecode._checks import check_int

SHORT = 16
PAUSE = 0.6  # seconds between two sentences of the long sound
BEAMS = (1, 5)
_ROOT = Path(__file__).resolve().parent.parent


class Case(NamedTuple):
    """What is transcribed at once: names of sounds, and how a long one is read."""

    name: str
    sounds: list[str]
    way: str


class Peer:
    """A process that transcribes."""

    def __init__(self, name: str, python: str, dtype: str, **setup: Any) -> None:
        self.name, self.dtype = name, dtype
        worker = str(_ROOT / "benchmarks" / "transcriber_worker.py")
        # By its path: a peer's environment need not have this package.
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(
            [python, "-P", worker], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip
        self._send({"peer": name, "dtype": dtype, **setup})

    def _send(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        """Return its next answer; at first that it is ready."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self._process.wait()}")
        return json.loads(line)

    def run(self, case: Case, num_beams: int) -> tuple[float, float, list[str]]:
        """Return the seconds, those of processors, and the texts."""
        self._send({"sounds": case.sounds, "way": case.way, "num_beams": num_beams})
        wall, cpu, texts = self.answer()
        return wall, cpu, texts

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()


def spoken(count: int, folder: Path) -> tuple[Path, dict[str, str], dict[str, float]]:
    """Return a file of sounds, and their texts and seconds: short ones, and one of ``count``."""
    texts = sentences()
    sounds = [speak(text) for text in texts[: max(count, SHORT)]]
    pause = torch.zeros(int(PAUSE * RATE))
    found = {f"short{i}": sound.numpy() for i, sound in enumerate(sounds[:SHORT])}
    found["long"] = torch.cat([part for s in sounds[:count] for part in (s, pause)]).numpy()
    path = folder / "sounds.npz"
    np.savez(path, **found)  # type: ignore[arg-type]
    said = {f"short{i}": text for i, text in enumerate(texts[:SHORT])}
    said["long"] = " ".join(texts[:count])
    return path, said, {name: len(sound) / RATE for name, sound in found.items()}


def folder_of(model: str) -> Path:
    """Return the folder of a model; its name may be that of one in a package."""
    for packaged in WHISPER_MODELS:
        if packaged.name == model:
            found = find(packaged, _ROOT / "build" / "models")
            if isinstance(found, str):
                raise SystemExit(f"transcriber: {found}")
            return found.parent
    return Path(model)


@contextlib.contextmanager
def peers_of(given: argparse.Namespace, model: Path, sounds: Path) -> Iterator[list[Peer]]:
    """Start the peers; each is ready."""
    setup = {"model": str(model), "threads": given.threads, "sounds": str(sounds)}
    with contextlib.ExitStack() as stack:
        wanted = [("lmdecode", sys.executable, dtype) for dtype in given.dtypes]
        if given.faster_whisper:
            wanted.append(("faster-whisper", given.faster_whisper, "int8"))
        if given.transformers:
            wanted.append(("transformers", sys.executable, "float32"))
        peers = [Peer(*each, **setup) for each in wanted]
        for peer in peers:
            stack.callback(peer.close)
        for peer in peers:
            peer.answer()
        yield peers


def rows_of(
    peers: list[Peer], case: Case, num_beams: int, said: dict[str, str], rounds: int
) -> list[list[str]]:
    """Return a row of the table a peer: medians, how much slower than the first, words."""
    if case.way == "together":  # transformers has no such way that holds up
        peers = [peer for peer in peers if peer.name != "transformers"]
    results: dict[int, list[tuple[float, float, list[str]]]] = {i: [] for i in range(len(peers))}
    for number in range(rounds):
        for i, peer in enumerate(peers):
            if number == 0 or peer.name != "transformers":  # it takes long
                results[i].append(peer.run(case, num_beams))
    want = [said[name] for name in case.sounds]
    exact = results[len(peers) - 1][0][2] if peers[-1].name == "transformers" else None
    rows: list[list[str]] = []
    first = 0.0
    for i, peer in enumerate(peers):
        wall = statistics.median(result[0] for result in results[i])
        cpu = statistics.median(result[1] for result in results[i])
        first = first or wall
        texts = results[i][0][2]
        row = [
            case.name, "greedy" if num_beams == 1 else f"{num_beams} beams",
            f"{peer.name} {peer.dtype}", f"{wall:.2f}", f"{cpu:.2f}", f"{wall / first:.2f}x",
            f"{100 * word_error_rate(want, texts):.1f} %",
        ]  # fmt: skip
        row.append("" if exact is None else f"{100 * word_error_rate(exact, texts):.1f} %")
        assert all(words(text) for text in texts), f"{peer.name} heard nothing"
        rows.append(row)
    return rows


def main() -> int:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+", help="folders of CTranslate2, or whisper-base, ...")
    parser.add_argument("--faster-whisper", metavar="PYTHON", help="of its environment")
    parser.add_argument("--transformers", action="store_true", help="its pipeline, in one round")
    parser.add_argument("--dtypes", nargs="+", default=["int8"], help="of lmdecode")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sentences", type=int, default=30, help="of the long sound")
    parser.add_argument("--beams", type=int, nargs="+", default=list(BEAMS))
    given = parser.parse_args()
    check_int("transcriber", "--rounds", given.rounds, 1)
    check_int("transcriber", "--threads", given.threads, 1)
    check_int("transcriber", "--sentences", given.sentences, 1)
    if not can_speak():
        raise SystemExit(WHY_NOT)
    with tempfile.TemporaryDirectory() as folder:
        path, said, seconds = spoken(given.sentences, Path(folder))
        short = [name for name in said if name != "long"]
        cases = [
            Case("long, in order", ["long"], "in order"),
            Case("long, together", ["long"], "together"),
            Case(f"{len(short)} short", short, "short"),
        ]
        print(machine_line(given.threads))
        print(f"long: {seconds['long']:.0f} s; short: {sum(seconds[n] for n in short):.0f} s")
        head = ["sound", "search", "", "seconds", "CPU s", "x lmdecode", "words wrong",
                "other than transformers'"]  # fmt: skip
        for model in given.models:
            print(f"\n{model}\n\n| {' | '.join(head)} |\n{'|---' * len(head)}|", flush=True)
            with peers_of(given, folder_of(model), path) as peers:
                for peer in peers:  # what is set up at the first call
                    peer.run(Case("", short[:1], "short"), 1)
                for case in cases:
                    for num_beams in given.beams:
                        for row in rows_of(peers, case, num_beams, said, given.rounds):
                            print(f"| {' | '.join(row)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
