"""``lmdecode transcribe``: what it writes, and what it refuses, in a line."""

import argparse
import json
from pathlib import Path

import pytest

import lmdecode
from lmdecode.cli import transcribe
from tests.decoder.whisper_models import whisper_pair
from tests.speech.models import sound, tokenizer, write_wave

pytest.importorskip("av")


def run(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    transcribe.add_command(parser.add_subparsers())
    given = parser.parse_args(["transcribe", *map(str, arguments)])
    status: int = given.run(given)
    return status


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    whisper_pair(1)[1].save(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_files(tmp_path_factory.mktemp("files"), 2.5)


def write_files(folder: Path, seconds: float) -> list[Path]:
    paths = [folder / "a.wav", folder / "b.wav"]
    for seed, path in enumerate(paths):
        write_wave(path, sound(seconds, seed))
    return paths


def test_what_it_prints(model: Path, files: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--language", "en", "--beam-size", "1"]
    assert run(model, files[0], *options) == 0
    printed = capsys.readouterr()
    assert printed.out and not printed.err
    ours = lmdecode.Transcriber(model)
    segments, _ = ours.transcribe(files[0], language="en", beam_size=1)
    expected = list(segments)
    assert printed.out == "".join(f"{segment.text.strip()}\n" for segment in expected)
    assert run(model, files[0], *options, "--format", "verbose_json", "--word-timestamps") == 0
    found = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in found["segments"]] == [one.tokens for one in expected]
    assert found["words"] and found["language"] == "english"


@pytest.mark.parametrize(
    ("form", "suffix"),
    [("srt", "srt"), ("vtt", "vtt"), ("json", "json"), ("verbose_json", "json"), ("txt", "txt")],
)
def test_files(form: str, suffix: str, model: Path, tmp_path: Path) -> None:
    files, out = write_files(tmp_path, 1.0), tmp_path / "out"
    options = ["--format", form, "--output-dir", out, "--batch-size", "2", "--beam-size", "1"]
    assert run(model, *files, *options) == 0
    assert sorted(path.name for path in out.iterdir()) == [f"a.{suffix}", f"b.{suffix}"]
    assert all(path.read_text(encoding="utf-8").strip() for path in out.iterdir())


def test_what_it_refuses(
    model: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.wav"
    text.write_text("This is no sound.")
    for arguments, message in (
        ((model, tmp_path / "c.wav"), "c.wav: there is no such file"),
        ((tmp_path / "nothing", files[0]), "there is no file or folder"),
        ((model, text), "text.wav cannot be decoded"),
        ((model, files[0], "--language", "xx"), "language is 'xx'"),
        ((model, files[0], "--beam-size", "0"), "beam_size is 0"),
        ((model, files[0], "--threads", "0"), "--threads is 0"),
        ((model, files[0], "--batch-size", "0"), "batch_size is 0"),
    ):
        assert run(*arguments) == 1
        error = capsys.readouterr().err
        assert message in error and error.startswith("transcribe: ") and error.count("\n") == 1
