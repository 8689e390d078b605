"""The pages: their examples run, those with results give them, and their links lead somewhere."""

import doctest
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for page in ROOT.glob(pattern)
)
WITH_EXAMPLES = (
    "README.md",
    "docs/attention.md",
    "docs/beam_ops.md",
    "docs/beam_scorers.md",
    "docs/beam_search.md",
    "docs/decoder.md",
    "docs/kv_cache.md",
    "docs/linear.md",
    "docs/ring_cache.md",
    "docs/sampling.md",
    "docs/store.md",
    "docs/transformers.md",
    "examples/g2p/README.md",
    "examples/kjv_mistral/README.md",
)
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


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def tiny_model() -> dict[str, object]:
    """The names that docs/transformers.md takes for granted; the weights are random."""
    import functools

    transformers = pytest.importorskip("transformers")

    class Streamer:
        def put(self, value: torch.Tensor) -> None:
            pass

        def end(self) -> None:
            pass

    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return {
        "functools": functools,
        "torch": torch,
        "LlamaForCausalLM": transformers.LlamaForCausalLM,
        "model": transformers.LlamaForCausalLM(config).eval(),
        "inputs": {"input_ids": torch.tensor([[1, 5, 9]]), "attention_mask": torch.ones(1, 3)},
        "streamer": Streamer(),
    }


def test_every_page_with_examples_is_run() -> None:
    assert [name(page) for page in PAGES if blocks(page)] == sorted(WITH_EXAMPLES)


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of a page run one after the other, in one namespace, from the project's folder."""
    monkeypatch.chdir(ROOT)
    torch.manual_seed(0)
    found = blocks(ROOT / page)
    assert found
    namespace: dict[str, object] = {"__name__": "__main__"}
    if page == "docs/transformers.md":
        namespace.update(tiny_model())
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    skipped = []
    for language, line, code in found:
        lacking = missing(code)
        if lacking is not None:
            skipped.append(f"line {line} needs {lacking}")
        elif language == "pycon":
            test = doctest.DocTestParser().get_doctest(code, namespace, page, page, line)
            messages: list[str] = []
            runner.run(test, out=messages.append, clear_globs=False)
            assert not runner.failures, "".join(messages)
            namespace.update(test.globs)
        else:
            exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
    if len(skipped) == len(found):
        pytest.skip("; ".join(skipped))


def links(page: Path) -> list[str]:
    """Targets of links and images, but for those on the web."""
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links(page: Path) -> None:
    """Links to files and headings lead somewhere, within the project."""
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.is_relative_to(ROOT) and file.exists(), target
        assert not anchor or anchor in anchors(file), target


def test_there_are_links_to_check() -> None:
    assert {name(page) for page in PAGES if links(page)} >= {
        "CONTRIBUTING.md",
        "README.md",
        "docs/sampling.md",
    }
    pages = {name(page) for page in PAGES}
    assert {"docs/adding_an_op.md", "docs/architecture.md", "docs/benchmarks.md"} <= pages


def test_the_table_of_dialects_names_them_all() -> None:
    from lmdecode import DIALECTS

    text = (ROOT / "docs" / "sampling.md").read_text()
    assert all(f"`{dialect}`" in text for dialect in DIALECTS)


def test_the_store_names_tests_that_exist() -> None:
    """Of docs/store.md: which test shows what; a name may be a part of that of the test."""
    files = {path.name: path for path in (ROOT / "tests").rglob("*") if path.is_file()}
    row = re.compile(r"`(?:[\w/]+/)?(test_\w+\.py|\w+_test\.cpp)`(?:: (`\w+`(?:, `\w+`)*))?")
    found = row.findall((ROOT / "docs/store.md").read_text())
    assert len(found) > 40
    for file, names in found:
        text = files[file].read_text()
        tests = re.findall(r"^(?:def |TEST\()(\w+)", text, re.MULTILINE)
        for part in re.findall(r"\w+", names):
            assert any(part in test for test in tests), f"{file}: {part}"
