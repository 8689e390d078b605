"""The pages: examples run, links lead somewhere, cells are short, every public name is there."""

import doctest
import importlib
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.support.releases import BEFORE_5_3, BEFORE_5_23

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    page for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for page in ROOT.glob(pattern)
)
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
REFERENCE = sorted(ROOT.glob("docs/reference/*.md"))
API = sorted(ROOT.glob("docs/api/*.md"))
FORMATS = (ROOT / "docs/reference/store_format.md",)  # bytes, which no example shows
WITH_EXAMPLES = (
    "README.md", "docs/guides/agents.md", "docs/guides/batch_invariant.md",
    "docs/guides/beam_search.md",
    "docs/guides/command_line.md",
    "docs/guides/control_sampling.md", "docs/guides/embeddings.md", "docs/guides/fast_models.md",
    "docs/guides/generate.md",
    "docs/guides/install.md", "docs/guides/long_prompts.md", "docs/guides/prompts_on_disk.md",
    "docs/guides/serve.md", "docs/guides/serving.md", "docs/guides/serving_engines.md",
    "docs/guides/transcribe.md", "docs/guides/translation_and_speech.md",
    "docs/guides/your_files.md", "docs/index.md", "docs/internals/adding_a_rule.md",
    "docs/reference/attention.md", "docs/reference/beam.md", "docs/reference/beam_scorers.md",
    "docs/reference/beam_search.md", "docs/reference/causal_models.md",
    "docs/reference/ctranslate2.md", "docs/reference/decoder.md", "docs/reference/formats.md",
    "docs/reference/kv_cache.md", "docs/reference/linear.md", "docs/reference/ring_cache.md",
    "docs/reference/sampler.md", "docs/reference/sampling.md", "docs/reference/serving.md",
    "docs/reference/store.md", "docs/reference/transformers.md", "docs/reference/trie.md",
    "examples/g2p/README.md", "examples/kjv_mistral/README.md",
)  # fmt: skip
OF_SPEECH = ("docs/guides/transcribe.md",)
OF_FILES = ("docs/guides/your_files.md", "docs/reference/formats.md")
PUBLIC_MODULES = (
    "lmdecode", "lmdecode.store", "lmdecode.reference", "lmdecode.integrations.transformers",
    "lmdecode.integrations.ray", "lmdecode.integrations.sglang", "lmdecode.integrations.vllm",
    "lmdecode.compat.ascend", "lmdecode.compat.faster_transformer", "lmdecode.formats.ctranslate2",
)  # fmt: skip
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
    if BEFORE_5_3 and "prompt_lookup_num_tokens" in code and "custom_generate" in code:
        return "transformers 5.3"
    if BEFORE_5_23 and re.search(r"import (generate_batch|BatchingManager)$", code, re.MULTILINE):
        return "transformers 5.23"
    for module in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        try:
            __import__(module)
        except ImportError:
            return module
    return None


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def tiny_model() -> dict[str, object]:
    """The names that the page of transformers takes for granted; the weights are random."""
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


def folder_with_a_file(folder: Path) -> Path:
    """The folder that pages of files take for granted: a small model.gguf beside the examples."""
    pytest.importorskip("gguf")
    from tests.support.gguf_files import write_word_model

    (folder / "examples").symlink_to(ROOT / "examples")
    write_word_model(folder / "model.gguf", ["the", "cat", "sat", "on", "mat"])
    return folder


def folder_with_speech(folder: Path) -> Path:
    """The folder that pages of speech take for granted: a model, and sounds of any name."""
    pytest.importorskip("av")
    from tests.decoder.whisper_models import whisper_pair
    from tests.speech.models import sound, tokenizer, write_wave

    whisper_pair(1)[1].save(folder / "whisper-base")
    tokenizer().save(str(folder / "whisper-base" / "tokenizer.json"))
    for seed, file in enumerate(("talk.mp3", "song.mp3")):
        write_wave(folder / file, sound(2.5, seed))
    return folder


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples(page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of a page run one after the other, in one namespace, from the project's folder."""
    folder = ROOT
    if page in OF_FILES:
        folder = folder_with_a_file(tmp_path)
    elif page in OF_SPEECH:
        folder = folder_with_speech(tmp_path)
    monkeypatch.chdir(folder)
    torch.manual_seed(0)
    found = blocks(ROOT / page)
    assert found
    namespace: dict[str, object] = {"__name__": "__main__"}
    if page == "docs/reference/transformers.md":
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


@pytest.mark.parametrize("page", ["docs/guides/prompts_on_disk.md", "docs/reference/store.md"])
def test_conversations_in_which_the_model_writes_its_padding_token(
    page: str, tmp_path: Path
) -> None:
    """The examples go on with such a one: a token of the answer is made that of padding."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("lmdecode.store")
    shipped = ROOT / "examples/kjv_mistral/model"
    if not (shipped / "model.safetensors").is_file():
        pytest.skip(f"needs {shipped}")
    folder = tmp_path / "model"
    shutil.copytree(shipped, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("In the beginning", return_tensors="pt").input_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    answer = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    pad = next(token for token in answer if token not in ids)
    for file in (folder / "config.json", folder / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token_id": pad}))
    namespace: dict[str, object] = {"__name__": "__main__"}
    found = [
        code.replace("examples/kjv_mistral/model", str(folder))
        for language, _, code in blocks(ROOT / page)
        if language == "python" and ('"chat"' in code)
    ]
    assert found
    for code in found:
        exec(compile(code, page, "exec"), namespace)
        assert pad in namespace["ids"]  # type: ignore[operator]


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
        "docs/index.md",
        "docs/reference/sampling.md",
    }
    pages = {name(page) for page in PAGES}
    internals = {f"docs/internals/{n}.md" for n in ("adding_an_op", "architecture", "measurements")}
    assert internals <= pages


def test_the_table_of_dialects_names_them_all() -> None:
    from lmdecode import DIALECTS

    text = (ROOT / "docs/reference/sampling.md").read_text()
    assert all(f"`{dialect}`" in text for dialect in DIALECTS)


def test_the_page_of_the_sampler_names_all_that_it_takes() -> None:
    from lmdecode import Sampler, SamplerOutput, VerifyOutput
    from lmdecode.sampling import SAMPLER_DIALECTS, STAGES

    text = (ROOT / "docs/reference/sampler.md").read_text()
    with pytest.raises(TypeError, match="no parameter") as error:
        Sampler(1, 8, no_such_parameter=1)
    parameters = str(error.value).partition("expected one of ")[2].split(", ")
    assert len(parameters) > 25
    parameters = [name for name in parameters if not name.startswith("dry_")] + ["dry_*"]
    own = vars(Sampler).items()
    methods = [f"{name}(" for name, value in own if callable(value) and name[0] != "_"]
    fields = [*SamplerOutput._fields, *VerifyOutput._fields]
    named = [
        *parameters, *methods, *fields, *SAMPLER_DIALECTS,
        *(stage for stage in STAGES if "_" in stage),
    ]  # fmt: skip
    missing = [name for name in named if not re.search(rf"`[^`]*{re.escape(name)}", text)]
    assert missing == []


def test_the_store_names_tests_that_exist() -> None:
    """Of docs/internals/store.md: which test shows what; a name may be a part of the test's."""
    files = {path.name: path for path in (ROOT / "tests").rglob("*") if path.is_file()}
    row = re.compile(r"`(?:[\w/]+/)?(test_\w+\.py|\w+_test\.cpp)`(?:: (`\w+`(?:, `\w+`)*))?")
    page = re.sub(r"\s+", " ", (ROOT / "docs/internals/store.md").read_text())
    found = row.findall(page)
    assert len(found) > 40
    for file, names in found:
        text = files[file].read_text()
        tests = re.findall(r"^(?:def |TEST\()(\w+)", text, re.MULTILINE)
        for part in re.findall(r"\w+", names):
            assert any(part in test for test in tests), f"{file}: {part}"
    sources = {path.name for folder in ("csrc", "python") for path in (ROOT / folder).rglob("*.*")}
    code = re.findall(r"`(\w+\.(?:cpp|h|py))`", page)
    assert len(code) > 40
    assert [file for file in code if file not in sources | set(files)] == []


def prose(page: Path) -> list[str]:
    """Lines that are not code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL).split("\n")


def shown(cell: str) -> str:
    """What a reader sees of a cell: of a link its text."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell).strip()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_lines_and_cells_are_short(page: Path) -> None:
    """Prose ends at column 100; a cell of a table has at most 80 characters."""
    for line in prose(page):
        if line.startswith("|"):
            cells = [shown(cell) for cell in re.split(r"(?<!\\)\|", line)]
            assert [cell for cell in cells if len(cell) > 80] == []
        else:
            assert len(line) <= 100 or " " not in line.strip(), line


@pytest.mark.parametrize("page", [ROOT / "docs/index.md", *GUIDES, *REFERENCE], ids=name)
def test_a_page_begins_with_what_it_is_for_and_an_example(page: Path) -> None:
    head = page.read_text().partition("\n## ")[0]
    title, _, first, *_ = head.split("\n")
    assert title.startswith("# ") and re.match(r"[A-Za-z`]", first), head
    sentence = re.match(r"[^|#]+?\.(?=\s)", head.partition("\n\n")[2])
    assert sentence and "```" not in sentence[0], head
    assert page in FORMATS or BLOCK.search(head), f"no example before the first heading: {page}"


def test_the_readme_fits_two_screens_and_has_the_measured_speeds() -> None:
    pytest.importorskip("tqdm")
    sys.path.insert(0, str(ROOT))
    try:
        from benchmarks import plot_readme
    finally:
        sys.path.remove(str(ROOT))
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert plot_readme.table() in text
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert str(plot_readme.CHART.relative_to(ROOT)) in pictures and len(pictures) == 2
    for picture in pictures:
        assert 1000 < (ROOT / picture).stat().st_size < 150_000, picture


def test_sources_name_pages_that_exist() -> None:
    pages = {
        (file, page)
        for folder in ("csrc", "python", "tests", "benchmarks", "examples")
        for file in (ROOT / folder).rglob("*")
        if file.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".md", ".sh"}
        and file != Path(__file__)
        for page in re.findall(r"\bdocs/[\w/]+\.md\b", file.read_text())
    }
    assert len(pages) > 20
    assert [f"{name(file)}: {page}" for file, page in pages if not (ROOT / page).exists()] == []


def public_object(module: object, name: str) -> object:
    """What a public name stands for; where that needs what is missing, something of its own."""
    try:
        return getattr(module, name)
    except ImportError:
        return object()


def public_objects() -> dict[str, object]:
    """Every public name with what it stands for; modules that need what is missing are left out."""
    found: dict[str, object] = {}
    for module in PUBLIC_MODULES:
        try:
            loaded = importlib.import_module(module)
        except ImportError:
            continue
        found.update({f"{module}.{n}": public_object(loaded, n) for n in loaded.__all__})
    return found


def test_the_api_pages_have_every_public_name_once() -> None:
    documented = [
        path for page in API for path in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(documented) == len(set(documented)) > 100
    public = public_objects()
    known = [public[path] for path in documented if path in public]
    missing = [n for n, value in public.items() if not any(value is other for other in known)]
    assert missing == []
    modules = {path.rpartition(".")[0] for path in public}
    gone = [p for p in documented if p not in public and p.rpartition(".")[0] in modules]
    assert gone == []
