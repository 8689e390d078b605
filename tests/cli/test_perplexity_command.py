"""``python -m lmdecode perplexity``: its table, and what it refuses, in a line."""

from pathlib import Path

import pytest

import lmdecode
from lmdecode.__main__ import main
from lmdecode.linear.formats import FORMATS

MODEL = Path(__file__).resolve().parents[2] / "examples" / "kjv_mistral" / "model"
pytestmark = pytest.mark.skipif(not MODEL.is_dir(), reason="the model is in source checkouts only")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("In the beginning God created the heaven and the earth.\n" * 20)
    return path


def table(printed: str) -> dict[str, list[str]]:
    """Name of a format to the cells of its row."""
    rows = printed.split("\n\n")[1].splitlines()[2:]
    return {row.split()[0]: row.split()[1:] for row in rows}


def test_a_row_a_format(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", str(MODEL), "--text", str(text), "--window", "32"]) == 0
    printed = capsys.readouterr().out
    rows = table(printed)
    assert list(rows) == list(FORMATS)
    assert rows["float32"][0] == "32.00" and rows["float32"][3] == "+0.00"
    assert f"{text}: " in printed and "windows of 32 tokens" in printed
    first = float(rows["float32"][1])
    near = {"float32": 0.0, "bfloat16": 0.02, "int8": 0.05, "int4": 0.3}
    for name, row in rows.items():
        assert abs(float(row[1]) / first - 1) <= near[name]


def test_formats_tokens_and_caches(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--dtype", "int8", "bf16", "--tokens", "70", "--window", "32"]
    options += ["--cache-dtype", "int8"]
    assert main(["perplexity", str(MODEL), "--text", str(text), *options]) == 0
    printed = capsys.readouterr().out
    assert list(table(printed)) == ["int8", "bfloat16"]
    assert "2 windows of 32 tokens, 30 tokens scored" in printed


def test_a_saved_model(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    lmdecode.Decoding.from_pretrained(MODEL, "int8").save(saved)
    command = ["perplexity", str(saved), "--text", str(text), "--window", "32"]
    assert main(command) == 0
    assert list(table(capsys.readouterr().out)) == ["int8"]
    assert main([*command, "--dtype", "int4"]) == 1
    assert "was written by Decoding.save; expected none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--dtype", "fp9"], "--dtype: a format is 'fp9'; expected one of float32, bfloat16"),
        (["--tokens", "20"], "perplexity: ids has 20 tokens; expected at least 512, a window"),
        (["--window", "2"], "perplexity: window is 2; expected 4 to"),
        (["--cache-dtype", "int2"], "cache_dtype is 'int2'; expected one of float32"),
        (["--text", "no/such/file"], "no/such/file"),
    ],
)
def test_errors_are_a_line(
    options: list[str], error: str, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["perplexity", str(MODEL), "--text", str(text), *options]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1 and error in printed.err
    assert not printed.out


def test_a_model_that_is_not_there(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["perplexity", "no/such/model", "--text", str(text)]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("perplexity: ") and printed.err.count("\n") == 1


def test_numbers_and_paths_that_are_refused(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["perplexity", str(MODEL), "--text", str(text)]
    for option in ("--threads", "--tokens"):
        assert main([*command, option, "0"]) == 1
        assert capsys.readouterr().err == f"perplexity: {option} is 0; expected at least 1\n"
    missing = tmp_path / "model.gguf"
    assert main(["perplexity", str(missing), "--text", str(text)]) == 1
    expected = f"perplexity: {missing}: there is no such file or folder\n"
    assert capsys.readouterr().err == expected
