"""The house stays small: one place for each thing, one meaning for each name, a ledger of lines."""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "python" / "lmdecode"
SUFFIXES = {".py", ".pyi", ".cpp", ".h", ".cu", ".cuh", ".html"}

# The files that make caches and searches of packed models. A new loop is a kind of rows on the
# steps of an engine (docs/internals/architecture.md): it needs no line here.
MAKERS: dict[str, set[str]] = {
    "CausalCaches": {
        "decoder/causal_batch.py",
        "decoder/embedding.py",  # reads texts, writes none
        "decoder/engine/model_drafts.py",
        "decoder/engine/steps.py",
        "quality.py",  # reads texts, writes none
    },
    "DecodingSearches": {
        "decoder/engine/encoder_decoder_steps.py",
        "decoder/search_slots.py",
        "decoder/searches.py",
    },
    "DeviceSearches": {"decoder/searches.py"},
    "new_searches": {"integrations/transformers/decoding/encoder_decoder_generation.py"},
}

# Lines of sources by folder. A change that needs more says so here, in the same commit.
MOST_LINES = {"csrc": 46_820, "python": 71_800, "tests": 89_800, "benchmarks": 14_140}


@functools.cache
def _trees() -> list[tuple[str, ast.Module]]:
    paths = sorted(PACKAGE.rglob("*.py"))
    return [(path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())) for path in paths]


@pytest.mark.parametrize("name", MAKERS)
def test_caches_and_searches_are_made_in_few_places(name: str) -> None:
    found = {
        path
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    }
    assert found == MAKERS[name]


def test_a_public_class_name_stands_once() -> None:
    """The reference has the names of what it is the reference of."""
    places = defaultdict(list)
    for path, tree in _trees():
        for node in tree.body:
            is_private = isinstance(node, ast.ClassDef) and node.name.startswith("_")
            if isinstance(node, ast.ClassDef) and not is_private:
                if not path.startswith("reference/"):
                    places[node.name].append(path)
    assert {name: of for name, of in places.items() if len(of) > 1} == {}


def test_the_ledger_of_lines() -> None:
    found: Counter[str] = Counter()
    for folder in MOST_LINES:
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in SUFFIXES and "results" not in path.parts and path.is_file():
                found[folder] += len(path.read_bytes().splitlines())
    fits = all(0.95 * most < found[folder] <= most for folder, most in MOST_LINES.items())
    assert fits, f"{dict(found)}: raise or lower MOST_LINES of this file"
