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
import torch

from tests.support.processes import run_python

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

_MODEL = Path(__file__).resolve().parents[1] / "examples" / "kjv_mistral" / "model"


def _unwrapped(text: str) -> str:
    """A text that is wrapped to the terminal, in one line."""
    return " ".join(text.split())


def _table(text: str, head: str) -> tuple[str, list[str]]:
    """The head that begins so, and the rows below it."""
    lines = text[text.index(f"\n{head}") + 1 :].split("\n\n")[0].splitlines()
    return lines[0], lines[2:]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """``refused(*arguments)``: what a demo that fails, in this process, writes to stderr."""
    from lmdecode.demo.__main__ import main

    def run(*arguments: object, status: int = 1) -> str:
        capsys.readouterr()  # of what the test did before
        try:
            ended = main([*map(str, arguments)])
        except SystemExit as error:  # of the parser
            ended = error.code
        assert ended == status
        return capsys.readouterr().err

    return run


# --- A first look ---------------------------------------------------------------------------------


def _check_model(text: str) -> None:
    # By lmdecode alone: the first text, and how fast it is.
    assert re.search(r"\n    Psalms 23\n.+\n\n40 tokens in \d+ ms, ", text, re.DOTALL)
    assert re.search(r" [\d,]+ tokens a second\.\n", text)
    assert "In float32, 7 of 7 texts have the ids of transformers." in text
    head, rows = _table(text, "search ")
    assert head.split()[1:] == ["transformers", "float32", "bfloat16", "int8"]
    assert [row.split("  ")[0] for row in rows] == ["greedy", "4 beams", "sampled"]
    assert all(re.search(r" +[\d,]+( +[\d,]+ +[\d.]+x){3}$", row) for row in rows), rows


def _check_sampling(text: str) -> None:
    assert "Greedy: ids equal to those of transformers, 4 prompts" in text
    head, rows = _table(text, "case ")
    assert head.split() == ["case", "transformers", "us", "lmdecode", "us", "ratio"]
    assert [re.search(r"B = (\d)", row)[1] for row in rows] == ["1", "8", "1", "8"]
    assert all(re.search(r"[\d.,]+ +[\d.,]+ +[\d.]+x$", row) for row in rows), rows


def _check_beam(text: str) -> None:
    assert "the 4 best sequences equal to those of transformers, 4 prompts" in _unwrapped(text)
    tree, rest = text.split("what became of it:\n\n")[1].split("\n\nThe best of each prompt")
    assert re.search(r"^[|`]- '", tree) and "dropped after" in tree
    # The scores of the tree are those of the results.
    shown = re.findall(r"(-\d+\.\d{3})  result (\d)", tree)
    assert sorted(rank for _, rank in shown) == ["1", "2", "3", "4"]
    best = re.findall(r"(-\d+\.\d{3})  ['\"]", rest)[:4]
    assert [score for score, _ in sorted(shown, key=lambda entry: entry[1])] == best
    for name in ("a call", "a step"):
        assert re.search(rf"^{name} +[\d.,]+ +[\d.,]+ +[\d.]+x$", rest, re.MULTILINE)


def _check_window(text: str) -> None:
    expected = "ids equal to those of transformers, 24 new tokens behind a prompt of"
    assert expected in _unwrapped(text)
    head, rows = _table(text, "tokens ")
    assert head.split("  ")[:3] == ["tokens", "transformers ms", "lmdecode ms"]
    tokens, *figures = rows[0].split()
    assert int(tokens) == 8 * 128
    assert len(figures) == 5 and re.fullmatch(r"[\d.]+x", figures[2])
    assert all(int(mib) > 0 for mib in figures[3:])
    assert re.search(r"^Each token after a prompt of \d+: -?\d", text, re.MULTILINE)


def _check_store(text: str) -> None:
    told = _unwrapped(text)
    assert "the process was killed (SIGKILL) in turn 3 of 4, after 12 of 18 tokens" in told
    found = re.search(r"found psalms with (\d+), genesis with (\d+) tokens", told)
    assert found is not None and int(found[1]) > 18 and int(found[2]) > 18
    assert "token for token, the conversations that nobody interrupted" in told
    for length in (256, 1024):
        assert re.search(rf"^{length} tokens +[\d.,]+ +[\d.,]+ +[\d.]+x$", text, re.MULTILINE)


def _check_g2p(text: str) -> None:
    expected = r" 48 held-out words of .+held_out\.dict: ids of lmdecode equal to those of"
    assert re.search(expected, _unwrapped(text))
    head, rows = _table(text, "         ")
    assert head.split() == ["greedy", "beam", "4", "beam", "8"]
    table = {name: [*map(float, cells)] for name, *cells in (re.split(r" {2,}", r) for r in rows
                                                            if "error" in r)}  # fmt: skip
    names = ["phoneme error rate, %", "word error rate, %"]
    names += [f"word error rate, {dtype}, %" for dtype in ("bfloat16", "int8")]
    assert list(table) == names
    assert all(0 < rate < 50 for rates in table.values() for rate in rates), text
    for engine in ("transformers", "lmdecode", "lmdecode bfloat16", "lmdecode int8"):
        assert any(re.match(rf"{engine}, ms a word( +\d+\.\d{{3}}){{3}}$", row) for row in rows)


_CHECKS = {
    "model": _check_model, "sampling": _check_sampling, "beam": _check_beam,
    "window": _check_window, "store": _check_store, "g2p": _check_g2p,
}  # fmt: skip
# How a part begins and ends.
_PART = re.compile(r"^\[(\d)/6\] (\w+): [^\n]+\n\n(.*?)\n\[\1/6\] \2: \d+\.\d s\n", re.M | re.S)


@pytest.fixture(scope="module")
def first_look(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What the demos print without a name, and the picture of the beams."""
    pytest.importorskip("matplotlib")
    pytest.importorskip("lmdecode.store")
    picture = tmp_path_factory.mktemp("demo") / "pictures" / "beams.png"
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "80"}
    done = run_python("-m", "lmdecode.demo", "--plot", picture, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout, picture


@pytest.mark.parametrize("name", _CHECKS)
def test_a_part_of_a_first_look(name: str, first_look: tuple[str, Path]) -> None:
    """It finds what is right."""
    parts = {part[1]: part[2] for part in _PART.findall(first_look[0])}
    assert list(parts) == list(_CHECKS)
    _CHECKS[name](parts[name])


def test_a_first_look_fits_a_terminal_and_says_what_is_next(first_look: tuple[str, Path]) -> None:
    told, picture = first_look
    assert picture.read_bytes().startswith(b"\x89PNG")
    *before, last = told.rsplit("\n\n", 1)
    lines = [line for line in before[0].splitlines() if str(picture) not in line]
    assert [line for line in lines if len(line) > 80] == []
    steps = [line.split("  ")[-1].strip() for line in last.splitlines()]
    assert steps[0] == "make demo ARGS=all"
    assert re.fullmatch(r"\S*lmdecode chat \S+/model", steps[1])
    assert re.fullmatch(r"\S*lmdecode verify", steps[2])


# --- Where something differs ----------------------------------------------------------------------


def _other_ids(result: Any) -> Any:
    ids = result if isinstance(result, torch.Tensor) else result.sequences
    ids[0, -1] = (ids[0, -1] + 1) % 5
    return result


def _other_words(engine: Any) -> Any:
    def broken(ids: Any, mask: Any, num_beams: int, results: int) -> Any:
        found = engine(ids, mask, num_beams, results)
        if num_beams == 4:
            found[2][0].tokens.append(1)
        return found

    return broken


@pytest.mark.parametrize(
    ("part", "name", "wrong", "message"),
    [
        ("model", "Decoding.generate", _other_ids, "greedy, prompt 'Psalms 23"),
        ("model", "demo.model._first_text", lambda ids: [*ids[:-1], ids[-1] ^ 1], "prompt 'Psalms"),
        ("sampling", "integrations.transformers.sample", _other_ids, "greedy, prompt 'Genesis 1"),
        ("beam", "integrations.transformers.beam_search", _other_ids, "beam search, prompt 'Psalm"),
        ("window", "integrations.transformers.attention.attention_forward",
         lambda result: (result[0].flip(1), result[1]), "greedy, a prompt of 1024, first at token"),
        ("store", "demo.store._talked",
         lambda found: ({**found[0], "genesis": found[0]["genesis"][::-1]}, ""), "genesis, first"),
        ("g2p", "demo.g2p.our_engine", _other_words, "4 beams, word '"),
    ],
)  # fmt: skip
def test_a_part_fails_where_ids_differ(
    part: str, name: str, wrong: Callable[..., Any], message: str, refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if part == "store":
        pytest.importorskip("lmdecode.store")
    place, _, function = f"lmdecode.{name}".rpartition(".")
    right = getattr(pkgutil.resolve_name(place), function)
    monkeypatch.setattr(f"lmdecode.{name}", lambda *given, **named: wrong(right(*given, **named)))
    error = refused(part, "--quick")
    assert error.startswith("lmdecode.demo: ids differ from those of ")
    assert message in error


# --- Options and models ---------------------------------------------------------------------------


def test_the_stages_of_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line has what its stage left; the chosen token is one of those that are drawn from."""
    from lmdecode.demo.__main__ import main

    assert main(["sampling", "--explain"]) == 0
    printed = capsys.readouterr().out
    _, rows = _table(printed, "stage ")
    first, *stages = (row.split() for row in rows)
    assert [stage[:2] for stage in stages] == [
        ["temperature", "0.8"], ["top_k", "200"], ["top_p", "0.98"], ["min_p", "0.005"],
        ["top_n_sigma", "3"], ["epsilon_cutoff", "0.01"], ["typical_p", "0.95"],
    ]  # fmt: skip
    left = [int(line[-1]) for line in (first, *stages)]
    assert left == sorted(left, reverse=True)
    assert left[0] == left[1] > 0 and left[-1] > 0
    last = r"^Chosen: (.+), probability ([\d.]+) of these, ([\d.]+) of all, rank (\d+)\.$"
    chosen = re.search(last, printed, re.MULTILINE)
    assert chosen is not None
    assert float(chosen[2]) >= 0.01
    assert int(chosen[4]) <= left[2]
    tokens = [row.rsplit("  ", 1) for row in _table(printed, "token ")[1] if row[0] in "'\""]
    shares = [float(share) for _, share in tokens]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == min(left[-1], 8)
    if left[-1] <= 8:
        assert abs(sum(shares) - 1) < 0.01
        assert chosen[1] in [token.strip() for token, _ in tokens]


def test_g2p_demo_pronounces_words(capsys: pytest.CaptureFixture[str]) -> None:
    from lmdecode.demo.__main__ import main

    assert main(["g2p", "Bookworm", "strand's"]) == 0
    told, best = capsys.readouterr().out, {}
    for word in ("Bookworm", "strand's"):
        lines = re.search(rf"^{word}\n((?: +-\d+\.\d{{3}}  [A-Z ]+\n){{4}})", told, re.M)
        assert lines, told
        scores, texts = zip(*re.findall(r"(-\S+)  (.+)", lines.group(1)), strict=True)
        assert list(scores) == sorted(scores, key=float, reverse=True)
        assert len(set(texts)) == 4
        best[word] = texts[0]
    assert best == {"Bookworm": "B UH K W ER M", "strand's": "S T R AE N D Z"}


_LETTERS = "expected letters of '-.abcdefghijklmnopqrstuvwxyz"


@pytest.mark.parametrize(
    ("word", "message"),
    [("naïve", f"'ï'; {_LETTERS}"), ("a b2", f"' ', '2'; {_LETTERS}"),
     ("", "0 letters; expected 1 to 63"), ("ab" * 32, "64 letters; expected 1 to 63")],
)  # fmt: skip
def test_g2p_demo_names_the_letters_that_it_does_not_know(
    word: str, message: str, refused: Callable[..., str]
) -> None:
    assert f"lmdecode.demo: g2p: the word {word!r} has {message}\n" in refused("g2p", "hi", word)


def test_a_model_that_a_part_cannot_use(tmp_path: Path, refused: Callable[..., str]) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    assert refused("--model", tmp_path) == (
        f"lmdecode.demo: --model {tmp_path}: no config.json there; expected a model's folder\n"
    )
    folder = tmp_path / "model"
    shutil.copytree(_MODEL, folder)
    sizes = dict(vocab_size=99, hidden_size=32, intermediate_size=8, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    for window, positions in ((None, 4096), (128, 500)):
        options = dict(sliding_window=window, max_position_embeddings=positions)
        config = MistralConfig(**sizes, **heads, **options)
        MistralForCausalLM(config).save_pretrained(folder)
        expected = f"has a window of {window} and {positions} positions; expected room for 8"
        assert expected in refused("window", "--quick", "--model", folder)
    for path in folder.glob("*token*"):
        path.unlink()
    expected = f"lmdecode.demo: cannot load the model in {folder}: "
    assert refused("beam", "--model", folder).startswith(expected)
    (folder / "config.json").write_text('{"model_type": "mixtral"}')
    error = refused("model", "--model", folder)
    assert "has a model of type 'mixtral'; expected a causal language model of" in error


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The name of each demo that runs, which does nothing else, and what it is asked for."""
    from lmdecode.demo import __main__ as main

    made: list[tuple[str, Any]] = []
    for name, (demo, _) in main._DEMOS.items():
        monkeypatch.setattr(demo, "run", lambda look, name=name: made.append((name, look)))
    monkeypatch.setattr("lmdecode.demo.store.prepare_processes", lambda: None)
    return made


def test_which_demos_run_and_how(
    looks: list[tuple[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    from lmdecode.demo.__main__ import main
    from lmdecode.demo.harness import Look

    def ran(*arguments: str) -> list[tuple[str, Any]]:
        looks.clear()
        assert main(arguments) == 0
        return looks

    quick, full = ([(name, Look(quick=it, words=[])) for name in _CHECKS] for it in (True, False))
    assert ran() == ran("all", "--quick") == quick
    assert ran("all") == ran(*_CHECKS) == full
    capsys.readouterr()
    assert ran("beam", "--tokens", "3") == [("beam", Look(tokens=3, words=[]))]
    assert "make demo" not in capsys.readouterr().out
    assert ran("g2p", "through", "model") == [("g2p", Look(words=["through", "model"]))]
    model = Path("x")
    assert ran("g2p", "--model", "x") == [("g2p", Look(model, words=[]))]
    assert ran("beam", "g2p", "--model", "x") == [
        ("beam", Look(model, words=[])), ("g2p", Look(words=[]))
    ]  # fmt: skip


def test_a_demo_of_what_is_not_built(
    monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends no run of several."""
    from lmdecode.demo.__main__ import main

    monkeypatch.setattr("lmdecode.demo.store.prepare_processes", lambda: None)
    monkeypatch.setitem(sys.modules, "lmdecode.store", None)
    why = "import of lmdecode.store halted; None in sys.modules"
    assert refused("store") == f"lmdecode.demo: {why}\n"
    assert main(["store", "store"]) == 0
    assert capsys.readouterr().out.count(f"It is left out: {why}\n") == 2


_HINT = (
    "lmdecode.demo: the demo needs {0} ({1}): pip install 'lmdecode[{2}]', or in its source folder "
    "pip install '.[{2}]'\n"
)


def test_the_first_text_needs_no_transformers(tmp_path: Path) -> None:
    (tmp_path / "transformers.py").write_text("raise ImportError('not here')\n")
    done = subprocess.run(
        [sys.executable, "-m", "lmdecode.demo", "model"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1
    assert "tokens a second" in done.stdout
    assert _HINT.format("transformers", "not here", "demo") in done.stderr


def test_what_pictures_need_is_asked_for_before_all_else(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, looks: list[tuple[str, Any]]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    why = "import of matplotlib halted; None in sys.modules"
    assert refused("--plot", "x.png") == _HINT.format("matplotlib", why, "demo-all")
    assert not looks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["beams"], "there is no demo 'beams'; expected model, sampling, beam, window, store, g2p, "
                    "or all alone"),
        (["model", "all"], "there is no demo 'all'; expected"),
        (["--tokens", "0"], "--tokens is 0; expected at least 1"),
        (["--plot", "out.txt"], "--plot is out.txt; expected a name in .png"),
        (["model", "--plot", "x.png"], "--plot is of beam alone"),
        (["--explain"], "--explain is of sampling alone"),
        (["model", "--explain"], "--explain is of sampling alone"),
    ],
)  # fmt: skip
def test_options_that_do_not_go(
    arguments: list[str], message: str, refused: Callable[..., str]
) -> None:
    assert message in refused(*arguments, status=2)
