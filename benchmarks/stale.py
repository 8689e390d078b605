"""``python -m benchmarks --stale``: results that are older than the kernels that they measure."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import report

# What texts of a model pass through, by how its paths in csrc begin.
WHOLE_MODEL = ("attention/", "beam/", "decoder/", "kv_cache/", "linear/", "sampling/")
_PATCH = ("-p", "-M", "-U0", "--no-color", "--no-ext-diff", "--src-prefix=a/", "--dst-prefix=b/")
_STRING_OR_COMMENT = re.compile(r"""("(?:\\.|[^"\\])*"|'\\?"')|//.*""")
_RUN = re.compile(
    r"CPU (.+?), \d+ cores(?:, kernels: (\w+))?.*?; date ([-\d]+); "
    r".*?commit (\w+)( with changes)?;(.*)",
    re.DOTALL,
)
_HUNK = re.compile(r"^@@ .*\n((?:[-+\\].*\n?)*)", re.MULTILINE)


def _git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    try:
        run = subprocess.run(command, capture_output=True, check=False)
    except FileNotFoundError:
        return ""
    return "" if run.returncode else run.stdout.decode(errors="replace")


def kernel_files(root: Path, sources: Sequence[str]) -> set[str]:
    """Return the C++ sources whose paths in csrc begin so, and the headers that they include."""
    csrc = root / "csrc"
    todo = [
        path
        for path in csrc.rglob("*.cpp")
        if path.relative_to(csrc).as_posix().startswith(tuple(sources)) and "cuda" not in path.name
    ]
    found = set()
    while todo:
        path = todo.pop()
        if path not in found and path.is_file():
            found.add(path)
            todo += [csrc / name for name in re.findall(r'#include "(.+)"', path.read_text())]
    return {path.relative_to(root).as_posix() for path in found}


def _code(hunk: str, sign: str) -> list[str]:
    lines = [line[1:] for line in hunk.split("\n") if line.startswith(sign)]
    return [code for line in lines if (code := _STRING_OR_COMMENT.sub(r"\1", line).strip())]


def _changes_code(patch: str, files: set[str]) -> bool:
    """Tell whether a patch changes more than comments; ``files`` get the names from before it."""
    found = False
    for part in f"\n{patch}".split("\ndiff --git a/")[1:]:
        before, _, after = part.partition("\n")[0].partition(" b/")
        if after in files:
            files.add(before)
            found |= any(_code(hunk, "-") != _code(hunk, "+") for hunk in _HUNK.findall(part))
    return found


def _changes_since(root: Path, commit: str, files: set[str]) -> list[str]:
    """Return the commits that changed code of the files and left a difference, newest first."""
    if not _changes_code(_git(root, "diff", *_PATCH, commit, "HEAD", "--", "csrc"), set(files)):
        return []
    style = '--format=%x00%h of %cs, "%s"'
    log = _git(root, "log", *_PATCH, style, f"{commit}..HEAD", "--", "csrc")
    files = set(files)
    changes = [one for one in log.split("\0")[1:] if _changes_code(one, files)]
    return [one.partition("\n")[0] for one in changes] or ["a merge"]


def _processor(text: str) -> str:
    found = re.search(r"\(family \d+, model \d+\)", text)
    return found[0] if found else text


def print_stale(
    root: Path, sources: Mapping[str, Sequence[str]], processor: str, kernels: str
) -> int:
    """Print what is stale of ``root``'s results; 1: something is, 2: git cannot tell.

    ``sources`` has what each group measures, as ``kernel_files`` takes it. A commit that git does
    not know, and a group that nobody measures, are told and do not count. ``kernels``: the level
    that runs here; results of another are not this machine's.
    """
    if not _git(root, "rev-parse", "HEAD"):
        print(f"--stale asks git, which has no history of {root}", file=sys.stderr)
        return 2
    told = stale = 0
    for page in sorted((root / "benchmarks" / "results").glob("*.md")):
        text = page.read_text()
        found = {group: _RUN.match(body) for group, body in report.sections(text).items()}
        if not any(found.values()):
            dates = sorted(set(re.findall(r"\b20\d\d-\d\d-\d\d\b", text)))
            print(f"{page.name}: no commit; {', '.join(dates) or 'no date'}")
        for group, run in found.items():
            if run is None:
                continue
            told += 1
            cpu, level, date, commit, more, table = run.groups("")
            known = _git(root, "log", "-1", "--format=%cs", commit, "--").strip()
            measured = WHOLE_MODEL if page.name.startswith("quality") else sources.get(group)
            if measured is None:
                verdict = "no benchmark measures this group"
            elif not known:
                verdict = "unknown, git does not have the commit"
            else:
                changes = _changes_since(root, commit, kernel_files(root, measured))
                if not changes:
                    continue
                stale += 1
                verdict = f"commits since: {len(changes)}, the last {changes[0]}"
            rows = sum(line.startswith("|") for line in table.rpartition("Cases:")[2].split("\n"))
            other = "" if _processor(cpu) == _processor(processor) else ", not this machine"
            if not other and level and level != kernels:
                other = f" with {level}, not this machine"
            print(
                f"{page.name}, {group}: {rows - 2} rows, commit {commit} of {known or date}{more}, "
                f"{cpu}{other}: {verdict}"
            )
    print(f"{stale} of {told} sections with a commit are stale")
    return int(stale > 0)
