"""The demo as a user runs it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_python

pytest.importorskip("transformers")
pytest.importorskip("tqdm")

pytestmark = pytest.mark.slow

_EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
_SHIPPED = _EXAMPLES / "kjv_mistral" / "model"
_G2P = _EXAMPLES / "g2p" / "model" / "model.safetensors"

needs_g2p = pytest.mark.skipif(
    not _G2P.is_file(), reason="needs the shipped model of letters to phonemes"
)


def _run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **environment}
    return run_python("-m", "lmdecode.demo", *arguments, env=env)


def _error_line(error: str) -> str:
    """The one line that is not from the rebuild of an editable install."""
    lines = [line for line in error.splitlines() if not line.startswith("ninja: ")]
    assert len(lines) == 1, error
    return lines[0]


@pytest.fixture
def refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """``refused(*arguments)``: what a demo that fails, in this process, writes to stderr."""
    from lmdecode.demo.__main__ import main

    def run(*arguments: object, status: int = 1) -> str:
        monkeypatch.setattr(sys, "argv", ["demo", *map(str, arguments)])
        capsys.readouterr()  # of what the test did before
        try:
            ended = main()
        except SystemExit as error:  # of the parser
            ended = error.code
        assert ended == status
        return capsys.readouterr().err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model, or where it is missing a random one."""
    if (_SHIPPED / "model.safetensors").is_file():
        return _SHIPPED
    import tokenizers
    from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    words = ["<s>", "</s>", "<unk>", "the", "in", "beginning", *(f"w{i}" for i in range(90))]
    vocabulary = {word: number for number, word in enumerate(words)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=split, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    config = MistralConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, bos_token_id=0, eos_token_id=1,
        sliding_window=32, max_position_embeddings=512,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


def _check_model(text: str) -> None:
    assert "In float32, 6 of 6 texts have the ids of transformers." in text
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("search "))
    assert lines[head].split()[1:5] == ["transformers", "float32", "bfloat16", "int8"]
    rows = lines[head + 2 : head + 5]
    assert [row.split("  ")[0] for row in rows] == ["greedy", "4 beams", "sampled"]
    for row in rows:
        assert re.search(r"( +[\d,]+){4}( +[\d.]+x){3}$", row), row


def test_model_demo_fails_where_ids_differ(
    model: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmdecode

    right = lmdecode.Decoding.generate

    def wrong(self: Any, *arguments: Any, **options: Any) -> Any:
        ids = right(self, *arguments, **options)
        ids[0, -1] = (ids[0, -1] + 1) % 5
        return ids

    monkeypatch.setattr(lmdecode.Decoding, "generate", wrong)
    error = refused("model", "--quick", "--model", model)
    assert "ids differ from those of transformers: greedy, prompt 'And Jesus" in error


def test_a_talk_goes_on_in_another_process(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lmdecode.store")
    command = ["-m", "lmdecode.demo", "chat", "--model", model]
    command += ["--store", tmp_path, "--session", "friends", "--tokens", 8]

    def talk(lines: str) -> str:
        done = run_python(*command, input=lines)
        assert done.returncode == 0, done.stderr
        return done.stdout

    first = talk("In the beginning\nAnd he said\n\n")
    assert "Talk 'friends' in" in first and "goes on" not in first
    assert first.count("> ") == 3
    found = re.search(r"It goes on behind (\d+) tokens", talk("the earth\n"))
    assert found is not None and 16 < int(found.group(1)) <= 16 + 20


def test_chat_names_a_model_that_it_does_not_run(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    error = refused("chat", "--model", tmp_path, "--store", tmp_path / "store")
    assert error.startswith("lmdecode.demo: ")
    assert "--tokens is 0" in refused("chat", "--tokens", 0, status=2)


@pytest.mark.parametrize("demo", ["chat", "model", "beam"])
def test_a_folder_without_a_tokenizer(
    demo: str, model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (model / name).is_file():
            shutil.copyfile(model / name, folder / name)
    store = ("--store", tmp_path / "store") if demo == "chat" else ()
    error = refused(demo, "--model", folder, *store)
    assert error == f"lmdecode.demo: no tokenizer in {folder}\n"
    (folder / "tokenizer.json").write_text("{}")
    error = refused(demo, "--model", folder, *store)
    assert error.startswith(f"lmdecode.demo: cannot load the tokenizer in {folder}: ")
    assert error.count("\n") == 1
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    if demo != "beam":  # which runs any model
        error = refused(demo, "--model", folder, *store)
        assert "has a model of type 'mixtral'; expected a causal language model of" in error


def test_stores_that_chat_cannot_open(
    model: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    store_module = pytest.importorskip("lmdecode.store")
    import transformers

    import lmdecode

    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x"
    error = refused("chat", "--model", model, "--store", path)
    assert error.startswith(f"lmdecode.demo: --store {path}: ") and error.count("\n") == 1
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    fingerprint = lmdecode.Decoding.from_pretrained(model, "int8").fingerprint(tokenizer)
    path = tmp_path / "store"
    with store_module.KVStore(path, fingerprint=fingerprint, capacity_bytes=1 << 24):
        done = run_python("-m", "lmdecode.demo", "chat", "--model", model, "--store", path)
    assert done.returncode == 0 and "Another program writes the store: " in done.stdout
    (path / fingerprint.name / "index.sqlite").write_text("no index")
    error = refused("chat", "--model", model, "--store", path)
    assert error.startswith(f"lmdecode.demo: --store {path}: ") and error.count("\n") == 1


def test_talks_in_other_formats(
    model: Path, tmp_path: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    pytest.importorskip("lmdecode.store")
    import io

    import lmdecode
    from lmdecode.demo import chat

    def talk(path: Path, session: str, dtype: str | None) -> str:
        monkeypatch.setattr(sys, "stdin", io.StringIO("In the\n\n"))
        chat.run(path, tmp_path / "store", session, dtype, 3)
        return capsys.readouterr().out

    assert "begins anew" not in talk(model, "a", None)
    assert "It goes on behind" in talk(model, "a", "int8")
    assert "It begins anew: the talk 'a' there is of " in (text := talk(model, "a", "bfloat16"))
    assert ", int8, " in text and "begins anew" not in talk(model, "b", "float32")
    saved = tmp_path / "saved"
    lmdecode.Decoding.from_pretrained(model, "bfloat16").save(saved)
    assert "It goes on behind" in talk(saved, "a", "bf16")
    error = refused("chat", "--model", saved, "--dtype", "int8", "--store", tmp_path / "store")
    assert f"--dtype is int8; expected bfloat16, in which {saved} was saved" in error


def test_options_of_other_demos_are_refused(refused: Callable[..., str]) -> None:
    for option in ("--dtype", "--store", "--session"):
        assert f"{option} is of chat alone" in refused("model", option, "int4", status=2)
    assert "--quick is not of chat" in refused("chat", "--quick", status=2)
    assert "--plot is not of chat" in refused("chat", "--plot", "x.png", status=2)
    assert "chat is given beside others; expected it" in refused("chat", "model", status=2)


def _check_sampling(text: str) -> None:
    assert "Greedy: ids equal to those of transformers, 4 prompts" in text
    assert "Sampled with lmdecode" in text
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("case "))
    assert lines[head].split() == ["case", "transformers", "us", "lmdecode", "us", "ratio"]
    rows = lines[head + 2 : head + 6]
    assert [re.search(r"B = (\d)", row).group(1) for row in rows] == ["1", "8", "1", "8"]
    for row in rows:
        assert re.search(r"[\d.,]+ +[\d.,]+ +\d+x$", row), row
    assert "V = 128256" in rows[2]


def test_demo_fails_where_greedy_ids_differ(
    model: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import lmdecode.integrations.transformers as integration

    right = integration.sample

    def wrong(*arguments: Any, **options: Any) -> Any:
        ids = right(*arguments, **options)
        ids[0, -1] = (ids[0, -1] + 1) % 5
        return ids

    monkeypatch.setattr(integration, "sample", wrong)
    error = refused("sampling", "--quick", "--model", model)
    assert "greedy ids differ from those of transformers: prompt 'Genesis 1" in error


def _check_beam(text: str) -> None:
    assert "the 4 best sequences equal to those of transformers, 4 prompts" in text
    tree, rest = text.split("what became of it:\n\n")[1].split("\n\nThe best of each prompt")
    assert re.search(r"^[|`]- '", tree) and "dropped after" in tree
    assert [f"result {rank}" in tree for rank in (1, 2, 3, 4)] == [True] * 4
    # The scores of the tree are those of the results.
    shown = re.findall(r"(-\d+\.\d{3})  result (\d)", tree)
    best = re.findall(r"(-\d+\.\d{3})  ['\"]", rest)[:4]
    assert [score for score, _ in sorted(shown, key=lambda entry: entry[1])] == best
    for name in ("transformers", "lmdecode"):
        assert re.search(rf"^{name} +\d+ +\d+\.\d\d$", rest, re.MULTILINE)


def test_beam_demo_fails_where_results_differ(
    model: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.demo import beam

    right = beam._search

    def wrong(*arguments: Any) -> Any:
        results, traces = right(*arguments)
        results[1].sequences[0, -1] += 1
        return results, traces

    monkeypatch.setattr(beam, "_search", wrong)
    error = refused("beam", "--quick", "--model", model)
    assert "beam search differs from that of transformers: prompt 'Genesis 1" in error


def _check_window(text: str) -> None:
    assert "ids equal to those of transformers, 8 new tokens behind a prompt of" in text
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("tokens "))
    assert lines[head].split("  ")[:3] == ["tokens", "transformers ms", "lmdecode ms"]
    tokens, *figures = lines[head + 2].split()
    assert int(tokens) in (4 * 128, 4 * 32)
    assert len(figures) == 5 and re.fullmatch(r"\d+\.\dx", figures[2])
    assert re.search(r"^Each token after a prompt of \d+: -?\d", text, re.MULTILINE)


def test_window_demo_fails_where_greedy_ids_differ(
    model: Path, refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.integrations.transformers import attention

    right = attention.attention_forward

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, weights = right(*arguments, **options)
        return out.flip(1), weights

    monkeypatch.setattr(attention, "attention_forward", wrong)
    error = refused("window", "--quick", "--model", model)
    assert "greedy ids differ from those of transformers, first at new token" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": None}, "has no sliding_window; expected one with a window"),
        ({"max_position_embeddings": 500}, "expected room for 4 windows and 8 tokens"),
    ],
)
def test_window_demo_needs_a_model_with_a_window(
    model: Path,
    tmp_path: Path,
    refused: Callable[..., str],
    options: dict[str, object],
    message: str,
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=128)
    MistralForCausalLM(MistralConfig(**{**sizes, **heads, **options})).save_pretrained(folder)
    assert message in _error_line(refused("window", "--quick", "--model", folder))


def _check_store(text: str) -> None:
    assert "the process was killed (SIGKILL) in turn 3 of 4, after 8 of 12 tokens" in text
    found = re.search(r"found psalms with (\d+), genesis with (\d+) tokens", text)
    assert found is not None and int(found[1]) > 12 and int(found[2]) > 12
    assert "token for token, the conversations that nobody interrupted" in text
    for length in (64, 192):
        assert re.search(rf"^{length} tokens +[\d.]+ +[\d.]+ +[\d.]+x$", text, re.MULTILINE)


_BROKEN_RESUME = """
import sys
from lmdecode.demo import store
right = store._resume
def wrong(*arguments):
    tokens = right(*arguments)
    tokens["genesis"][-1] += 1
    return tokens
store._resume = wrong
from lmdecode.demo.__main__ import main
sys.argv = ["demo", "store", "--quick", "--model", sys.argv[1]]
sys.exit(main())
"""


def test_store_demo_fails_where_the_text_differs(model: Path) -> None:
    pytest.importorskip("lmdecode.store")
    done = run_python("-c", _BROKEN_RESUME, model)
    assert done.returncode == 1
    assert "the resumed conversation differs from the one without a break: 'genesis'" in done.stderr


def _check_g2p(text: str) -> None:
    assert re.search(
        r"^48 held-out words of .+held_out\.dict: ids of lmdecode equal to those of transformers",
        text, re.MULTILINE,
    )  # fmt: skip
    head, _, *rows = text.split("\n\n")[2].splitlines()
    assert head.split() == ["greedy", "beam", "4", "beam", "8"]
    table = {name: cells for name, *cells in (re.split(r" {2,}", row) for row in rows)}
    names = ["phoneme error rate, %", "word error rate, %"]
    names += [f"word error rate, {dtype}, %" for dtype in ("bfloat16", "int8")]
    for name in names:
        assert all(0 < float(rate) < 50 for rate in table[name]), text
    for engine in ("transformers", "lmdecode", "lmdecode bfloat16", "lmdecode int8"):
        name = f"{engine}, ms a word"
        assert all(float(taken) > 0 for taken in table[name])


@needs_g2p
def test_g2p_demo_pronounces_words(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "words.png"
    done = _run("g2p", "--plot", picture, "Bookworm", "strand's")
    assert done.returncode == 0, done.stderr
    best = {}
    for word in ("Bookworm", "strand's"):
        lines = re.search(rf"^{word}\n((?: +-\d+\.\d{{3}}  [A-Z ]+\n){{4}})", done.stdout, re.M)
        assert lines, done.stdout
        scores, texts = zip(*re.findall(r"(-\S+)  (.+)", lines.group(1)), strict=True)
        assert list(scores) == sorted(scores, key=float, reverse=True)
        assert len(set(texts)) == 4
        best[word] = texts[0]
    assert best == {"Bookworm": "B UH K W ER M", "strand's": "S T R AE N D Z"}
    assert picture.read_bytes().startswith(b"\x89PNG")


@needs_g2p
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("naïve", "the word 'naïve' has 'ï'; expected letters of '-.abcdefghijklmnopqrstuvwxyz"),
        ("a b2", "the word 'a b2' has ' ', '2'; expected letters of '-.abcdefghijklmnopqrstuvwxyz"),
        ("", "the word '' has 0 letters; expected 1 to 63"),
        ("ab" * 32, f"the word {'ab' * 32!r} has 64 letters; expected 1 to 63"),
    ],
)
def test_g2p_demo_names_the_letters_that_it_does_not_know(
    word: str, message: str, refused: Callable[..., str]
) -> None:
    assert _error_line(refused("g2p", "hello", word)) == f"lmdecode.demo: g2p: {message}"


@needs_g2p
def test_g2p_demo_fails_where_ids_differ(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.demo import g2p

    right = g2p.our_engine

    def wrong(model: Any, dtype: str = "float32") -> Any:
        engine = right(model, dtype)

        def broken(ids: Any, mask: Any, num_beams: int, results: int) -> Any:
            found = engine(ids, mask, num_beams, results)
            if num_beams == 4:
                found[2][0].tokens.append(1)
            return found

        return broken

    monkeypatch.setattr(g2p, "our_engine", wrong)
    error = refused("g2p", "--quick")
    assert "4 beams: ids differ from those of transformers: word '" in error


_HEADING = re.compile(r"^== (\w+) ==\n\n", re.MULTILINE)


def test_all_demos(model: Path, tmp_path: Path) -> None:
    """One run of all: each has a section and a picture of its own, and finds what is right."""
    pytest.importorskip("matplotlib")
    checks = {"model": _check_model, "sampling": _check_sampling, "beam": _check_beam}
    checks["window"] = _check_window
    with contextlib.suppress(ImportError):
        importlib.import_module("lmdecode.store")
        checks["store"] = _check_store
    if _G2P.is_file():
        checks["g2p"] = _check_g2p
    pictures = tmp_path / "pictures"
    names = () if len(checks) == 6 else checks
    done = _run(*names, "--quick", "--model", model, "--plot", pictures / "demo.png")
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in pictures.iterdir()) == [f"demo_{n}.png" for n in sorted(checks)]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures.iterdir())
    _, *sections = _HEADING.split(done.stdout)
    assert sections[::2] == list(checks)
    for name, text in zip(sections[::2], sections[1::2], strict=True):
        checks[name](text)


def test_demo_names_a_folder_without_a_model(tmp_path: Path) -> None:
    done = _run("--model", tmp_path)
    assert done.returncode == 1
    assert _error_line(done.stderr) == (
        f"lmdecode.demo: --model {tmp_path}: no config.json there; expected a model's folder"
    )


@pytest.mark.parametrize("package", ["transformers", "matplotlib", "tqdm"])
def test_demo_names_the_extra_of_a_missing_package(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "lmdecode.demo", "--plot", tmp_path / "x.png"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert _error_line(done.stderr) == (
        f"lmdecode.demo: the demo needs {package} (not here): pip install 'lmdecode[demo]', "
        "or in its source folder pip install '.[demo]'"
    )


def test_demo_refuses_unknown_names_and_no_tokens(refused: Callable[..., str]) -> None:
    expected = (
        "there is no demo 'beams'; expected model, sampling, beam, window, store, g2p, or chat"
    )
    assert expected in refused("beams", status=2)
    assert "--tokens is 0; expected at least 1" in refused("--tokens", 0, status=2)
    assert "--plot is out.txt; expected a name in .png" in refused("--plot", "out.txt", status=2)
