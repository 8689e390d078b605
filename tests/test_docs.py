"""The examples of the pages run, and those with results give them."""

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "docs" / "sampling.md", ROOT / "docs" / "kv_cache.md"]
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, int, str]]:
    """Language, line and text of every block of Python."""
    text = page.read_text()
    return [(m[1], text.count("\n", 0, m.start(2)) + 1, m[2]) for m in BLOCK.finditer(text)]


def missing(code: str) -> str | None:
    """Return what a block needs and this environment lacks."""
    for path in re.findall(r"\"(examples/[\w/.]+)\"", code):
        if not (ROOT / path).exists():
            return path
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        try:
            __import__(module)
        except ImportError:
            return module
    return None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, in one namespace, from the project's folder."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    found = blocks(page)
    assert found
    namespace: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    skipped = []
    for language, line, code in found:
        lacking = missing(code)
        if lacking is not None:
            skipped.append(f"line {line} needs {lacking}")
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(code, namespace, page.name, str(page), line)
            messages: list[str] = []
            runner.run(test, out=messages.append, clear_globs=False)
            assert not runner.failures, "".join(messages)
            namespace.update(test.globs)
        else:
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), namespace)
    if len(skipped) == len(found):
        pytest.skip("; ".join(skipped))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    """Links to files and headings lead somewhere."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        if path:
            assert (page.parent / path).exists(), target
        else:
            assert anchor in anchors, target


def test_the_table_of_dialects_names_them_all() -> None:
    from lmdecode import DIALECTS

    text = (ROOT / "docs" / "sampling.md").read_text()
    assert all(f"`{dialect}`" in text for dialect in DIALECTS)
