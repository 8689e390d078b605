"""``lmdecode``: its commands, their help and their errors; run, convert, translate and info."""

import argparse
import io
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import lmdecode
from lmdecode.__main__ import main
from lmdecode.cli import COMMANDS, terminal, transcribe
from lmdecode.cli.errors import CommandError, told
from lmdecode.cli.terminal import busy
from lmdecode.serving import TextModel, Tokenizer
from tests.cli.talking import KJV, ROOT, TEMPLATES, saved_model
from tests.decoder.whisper_models import whisper_pair
from tests.speech.models import sound, tokenizer, write_wave
from tests.support.mtp_models import mtp_model, write_folder
from tests.support.processes import run_python

transformers = pytest.importorskip("transformers")
G2P = ROOT / "examples" / "g2p" / "model"
PRESENT = [name for name in COMMANDS if (ROOT / f"python/lmdecode/cli/{name}.py").is_file()]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), "chatml_default_system")


def stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode()), "utf-8"))


@pytest.mark.parametrize("name", ["", *PRESENT, "store", "demo"])
def test_help_fits_a_screen(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([*([name] if name else []), "--help"])
    printed = capsys.readouterr()
    assert ended.value.code == 0 and not printed.err
    assert printed.out.startswith(f"usage: lmdecode {name}".rstrip())
    assert len(printed.out.splitlines()) <= 30


@pytest.mark.parametrize(
    ("arguments", "status", "error"),
    [
        (["nothing"], 2, "invalid choice: 'nothing'"),
        (["run"], 2, "the following arguments are required: MODEL"),
        (["chat", "a", "--top-k", "x"], 2, "argument --top-k: invalid int value: 'x'"),
        (["run", "no/such/model", "a"], 1, "lmdecode run: there is no file or folder 'no/such/mo"),
        (["chat", "nomodel"], 1, "lmdecode chat: there is no file or folder 'nomodel'"),
        (["info", "/none"], 1, "lmdecode info: there is no file or folder '/none'"),
        (["run", str(KJV), "a", "--dtype", "int3"], 1, "--dtype is 'int3'; expected one of float"),
        (["run", str(KJV), "a", "--cache-dtype", "int3"], 1, "--cache-dtype is 'int3'; expected"),
        (["run", str(KJV), "a", "--max-tokens", "0"], 1, "--max-tokens is 0; expected at least 1"),
        (["run", str(KJV), "a", "--threads", "0"], 1, "--threads is 0; expected at least 1"),
        (["run", str(KJV), "a", "--context", "9999"], 1, "--context is 9999; expected at most"),
        (["run", str(KJV), "a", "--context", "1"], 1, "the prompt has 2 tokens; expected"),
        (["run", str(KJV), "a", "--system", "b"], 1, "expected none, as"),
        (["run", str(KJV), ""], 1, "the prompt is empty; expected a text"),
        (["run", str(KJV), "a", "--temperature", "-1"], 1, "temperature"),
        (["run", str(KJV), "a", "--json-schema", "{"], 1, "lmdecode run: --json-schema: "),
        (["run", str(KJV), "a", "--json-schema", "/no/file"], 1, "lmdecode run: --json-schema: "),
        (["run", str(KJV), "a", "--chat-template", "/no"], 1, "--chat-template is '/no'; expected"),
        (["run", str(KJV), "a", "--stop", ""], 1, "--stop is empty; expected a text"),
        (["run", str(KJV), "a", "--seed", "9" * 30], 1, "expected 0 to 9223372036854775807"),
        (["run", str(KJV), "a", "--seed", "-1"], 1, "--seed is -1; expected 0 to"),
        (["run", str(KJV), "a", "--draft", "/none"], 1, "there is no file or folder '/none'"),
        (["run", str(KJV), "a", "--draft", str(G2P)], 1, "expected a decoder-only model"),
        (["run", str(G2P), "a"], 1, "is an encoder-decoder model; expected a decoder-only one"),
        (["translate", str(KJV)], 1, "is a decoder-only model; expected an encoder-decoder one"),
        (["translate", str(G2P), "--to", "de"], 1, "--to is given; expected none"),
        (["translate", "/none", " "], 1, "the text is empty; expected a text"),
        (["translate", "/none", "a", "--file", __file__], 1, "a text and --file are given: 'a'"),
        (["translate", "/none", "--file", "/none"], 1, "--file is /none; expected a file"),
        (["translate", "/none", __file__], 1, f"expected a text, or --file {__file__}"),
        (["translate", "/none", "a", "b"], 2, "unrecognized arguments: b"),
        (["store", "ls", "/none"], 1, "no store in /none"),
    ],
)  # fmt: skip
def test_errors_are_a_line(
    arguments: list[str], status: int, error: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    stdin(monkeypatch, "")
    if status == 2:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
    else:
        assert main(arguments) == status
    printed = capsys.readouterr()
    assert not printed.out
    lines = printed.err.strip().splitlines()
    assert error in lines[-1]
    assert status == 2 or len(lines) == 1


def test_without_a_command_it_says_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for arguments in ([], ["info"]):
        assert main(arguments) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and f"lmdecode        {lmdecode.__version__}" in printed[0]


def test_info_of_models(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, facts in (
        (model, ["mistral saved by lmdecode", "int8", "4096", "4,096 tokens", "there is one"]),
        (KJV, ["mistral of transformers", "4096", "none"]),
        (tmp_path, ["a model of transformers", "not told", "none: "]),
    ):
        assert main(["info", str(path)]) == 0
        told = capsys.readouterr().out
        assert all(fact in told for fact in facts), told


def run(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> str:
    assert main(["run", *map(str, arguments)]) == status
    return capsys.readouterr().out


def test_run_answers_by_the_template(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--temperature", 0, "--max-tokens", 12]
    told = run(capsys, model, "In the beginning", *options, "--system", "Be brief.")
    loaded = TextModel.load(model)
    tokenizer = transformers.AutoTokenizer.from_pretrained(KJV)
    tokenizer.chat_template = TEMPLATES["chatml_default_system"].read_text()
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "In the beginning"}]  # fmt: skip
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    engine = loaded.decoding.engine(max_requests=1, capacity=200)
    tokens = engine.submit(prompt, max_new_tokens=12).result().tokens
    assert told == loaded.tokenizer.decode(tokens) + "\n"


def test_a_draft_changes_nothing(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engines = []
    of = lmdecode.Decoding.engine

    def engine(self: Any, **options: Any) -> Any:
        engines.append(of(self, **options))
        return engines[-1]

    monkeypatch.setattr(lmdecode.Decoding, "engine", engine)
    options = ["--max-tokens", 40, "--seed", 5, "--raw"]
    told = run(capsys, model, "In the beginning", *options)
    assert run(capsys, model, "In the beginning", *options, "--draft", KJV) == told
    counts = engines[-1].stats
    assert engines[0].stats.drafted_tokens == 0 < counts.accepted_tokens <= counts.drafted_tokens


def test_a_draft_with_other_padding(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    padded = shutil.copytree(KJV, tmp_path / "padded")
    small = transformers.AutoModelForCausalLM.from_pretrained(KJV)
    vocab = small.config.vocab_size
    small.resize_token_embeddings(vocab + 8, mean_resizing=False)
    small.save_pretrained(padded)
    assert lmdecode.Decoding.from_pretrained(padded).config.vocab_size == vocab + 8
    options = ["--max-tokens", 20, "--seed", 5, "--raw"]
    told = run(capsys, model, "In the beginning", *options)
    assert run(capsys, model, "In the beginning", *options, "--draft", padded) == told


def test_drafts_by_multi_token_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, vocab = tmp_path / "folder", json.loads((KJV / "config.json").read_text())["vocab_size"]
    write_folder(mtp_model("qwen3_5_text", "plain", vocab_size=vocab), folder)
    for file in KJV.glob("tokenizer*"):
        shutil.copy(file, folder)
    options = ["--max-tokens", 20, "--seed", 5, "--raw"]
    told = run(capsys, folder, "In the beginning", *options)
    assert run(capsys, folder, "In the beginning", *options, "--draft", "mtp") == told
    for name, more in (("saved", ["--mtp"]), ("without", [])):
        assert main(["convert", str(folder), str(tmp_path / name), *more]) == 0
    capsys.readouterr()
    assert run(capsys, tmp_path / "saved", "In the beginning", *options, "--draft", "mtp") == told
    arguments = ["run", str(tmp_path / "without"), "a", "--draft", "mtp"]
    assert main(arguments) == 1
    assert "was saved without these weights; expected a model" in capsys.readouterr().err
    assert main(["run", str(KJV), "a", "--draft", "mtp"]) == 1
    assert "mtp" in capsys.readouterr().err


def test_a_draft_of_other_tokens(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other"
    shutil.copytree(KJV, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second, *_ = [name for name, token in vocabulary.items() if token > 500]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert main(["run", str(model), "a", "--draft", str(other)]) == 1
    assert "expected a model with the" in capsys.readouterr().err


def test_run_goes_on_with_a_text(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--max-tokens", 16, "--seed", 5, "--raw"]
    told = run(capsys, model, "In the beginning", *options)
    assert run(capsys, model, "In the beginning", *options) == told
    stdin(monkeypatch, "In the beginning\n")
    assert run(capsys, model, *options) == told
    stdin(monkeypatch, "In the beginning\n")
    assert run(capsys, model, "-", *options) == told
    # Stops end the text before them; a part of one does not.
    stop = re.findall(r"\w+", told)[3]
    cut = run(capsys, model, "In the beginning", *options, "--stop", stop, "--stop", "zzzz")
    assert cut.rstrip("\n") == told[: told.index(stop)]
    greedy = [
        run(capsys, model, "In the beginning", "--raw", "--max-tokens", 9, *rest)
        for rest in (["--temperature", 0], ["--top-k", 1], ["--top-p", 0, "--seed", 3])
    ]
    assert greedy[0] == greedy[1] == greedy[2]


def test_an_answer_of_a_schema(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("llguidance")
    pytest.importorskip("lmdecode.serving.grammar")
    schema = {"type": "object", "properties": {"is_good": {"type": "boolean"}},
              "required": ["is_good"], "additionalProperties": False}  # fmt: skip
    told = run(capsys, model, "Is it good?", "--json-schema", json.dumps(schema))
    assert isinstance(json.loads(told)["is_good"], bool)


@pytest.mark.slow
def test_a_reader_that_has_enough_and_errors_of_a_process(model: Path) -> None:
    """In processes of their own: no traceback."""
    command = [sys.executable, "-m", "lmdecode", "run", str(model), "--raw", "In the beginning"]
    with subprocess.Popen(
        [*command, "--max-tokens", "2000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as reader:
        reader.stdout.read(1)
        reader.stdout.close()
        assert not reader.stderr.read()
    assert reader.returncode == 0
    done = run_python("-m", "lmdecode", "run", model, "--context", "1", "a")
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_convert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    shutil.copytree(KJV, source)
    (source / "additional_chat_templates").mkdir()
    for name, place in (("turns", "chat_template.jinja"),
                        ("instructions", "additional_chat_templates/tool_use.jinja")):  # fmt: skip
        (source / place).write_text(TEMPLATES[name].read_text())
    before = Tokenizer.load(source)
    folder = tmp_path / "converted"
    assert main(["convert", str(source), str(folder), "--dtype", "int4"]) == 0
    assert capsys.readouterr().out.startswith(f"{folder}: int4, ")
    shutil.rmtree(source)
    model = TextModel.load(folder)
    assert model.decoding.decoder.weight_format == "int4"
    assert model.tokenizer.get_vocab() == before.get_vocab()
    assert model.template is not None and model.template.names == ("default", "tool_use")
    assert model.tokenizer.chat_template == before.chat_template
    assert main(["convert", str(folder), str(tmp_path / "again")]) == 1
    assert "is a saved model; expected one of another kind" in capsys.readouterr().err
    assert main(["run", str(folder), "In the", "--max-tokens", "2"]) == 0
    assert main(["run", str(folder), "In the", "--dtype", "int8"]) == 1
    assert f"--dtype is int8; expected int4, in which {folder} was saved" in capsys.readouterr().err


def test_translate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["through", "tough", "", "abandon"]
    (tmp_path / "words.txt").write_text("\n".join(words))
    of_file = ["--file", str(tmp_path / "words.txt"), "--dtype", "float32"]
    assert main(["translate", str(G2P), *of_file]) == 0
    lines = capsys.readouterr().out.splitlines()
    decoding = lmdecode.Decoding.from_pretrained(G2P, "float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(G2P)
    for word, line in zip(words, lines, strict=True):
        expected = ""
        if word:
            ids = decoding.translate([tokenizer(word).input_ids])[0].new_tokens()
            expected = tokenizer.decode(ids, skip_special_tokens=True)
        assert line == expected
    stdin(monkeypatch, "through\n")
    assert main(["translate", str(G2P), "--dtype", "float32", "--beams", "1"]) == 0
    assert capsys.readouterr().out.startswith("TH R")
    saved = tmp_path / "saved"
    assert main(["convert", str(G2P), str(saved), "--dtype", "float32"]) == 0
    capsys.readouterr()
    stdin(monkeypatch, "through\n\ntough\n")
    assert main(["translate", str(saved)]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[0], "", lines[1]]
    for text, found in (("through", lines[:1]), ("through\n\ntough", [lines[0], "", lines[1]])):
        assert main(["translate", str(saved), text]) == 0
        assert capsys.readouterr().out.splitlines() == found
    stdin(monkeypatch, "tough")
    assert main(["translate", str(saved), "-"]) == 0
    assert capsys.readouterr().out.splitlines() == [lines[1]]
    assert main(["translate", str(saved), *of_file, *of_file]) == 0
    assert capsys.readouterr().out.splitlines() == [*lines, *lines]


def test_store_has_the_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lmdecode.store")
    with pytest.raises(SystemExit):
        main(["store", "rm", "--help"])
    assert capsys.readouterr().out.startswith("usage: lmdecode store rm")


def test_the_script_is_installed() -> None:
    import importlib.metadata

    scripts: Any = importlib.metadata.entry_points(group="console_scripts", name="lmdecode")
    assert [script.load() for script in scripts] == [main]


def transcribe_with(*arguments: str | Path) -> int:
    parser = argparse.ArgumentParser()
    transcribe.add_command(parser.add_subparsers())
    given = parser.parse_args(["transcribe", *map(str, arguments)])
    status: int = given.run(given)
    return status


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_what_it_prints(
    whisper: Path, files: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--language", "en", "--beam-size", "1"]
    assert transcribe_with(whisper, files[0], *options) == 0
    printed = capsys.readouterr()
    assert printed.out and not printed.err
    ours = lmdecode.Transcriber(whisper)
    segments, _ = ours.transcribe(files[0], language="en", beam_size=1)
    expected = list(segments)
    assert printed.out == "".join(f"{segment.text.strip()}\n" for segment in expected)
    assert (
        transcribe_with(
            whisper, files[0], *options, "--format", "verbose_json", "--word-timestamps"
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert [one["tokens"] for one in found["segments"]] == [one.tokens for one in expected]
    assert found["words"] and found["language"] == "english"


@pytest.mark.parametrize(
    ("form", "suffix"),
    [("srt", "srt"), ("vtt", "vtt"), ("json", "json"), ("verbose_json", "json"), ("txt", "txt")],
)
def test_files(form: str, suffix: str, whisper: Path, tmp_path: Path) -> None:
    files, out = write_files(tmp_path, 1.0), tmp_path / "out"
    options = ["--format", form, "--output-dir", out, "--batch-size", "2", "--beam-size", "1"]
    assert transcribe_with(whisper, *files, *options) == 0
    assert sorted(path.name for path in out.iterdir()) == [f"a.{suffix}", f"b.{suffix}"]
    assert all(path.read_text(encoding="utf-8").strip() for path in out.iterdir())


def test_what_it_refuses(
    whisper: Path, files: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.wav"
    text.write_text("This is no sound.")
    for arguments, message in (
        ((whisper, tmp_path / "c.wav"), "c.wav: there is no such file"),
        ((tmp_path / "nothing", files[0]), "there is no file or folder"),
        ((whisper, text), "text.wav cannot be decoded"),
        ((whisper, files[0], "--language", "xx"), "language is 'xx'"),
        ((whisper, files[0], "--beam-size", "0"), "beam_size is 0"),
        ((whisper, files[0], "--threads", "0"), "--threads is 0"),
        ((whisper, files[0], "--batch-size", "0"), "batch_size is 0"),
    ):
        assert transcribe_with(*arguments) == 1
        error = capsys.readouterr().err
        assert message in error and error.startswith("transcribe: ") and error.count("\n") == 1


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_has_a_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_AFTER", 0.05)
    monkeypatch.setattr(terminal, "_EVERY", 0.01)
    for stream, shows in ((Screen(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with busy(lambda: "Packing"):
            end = time.monotonic() + 30
            while shows and "Packing" not in stream.getvalue() and time.monotonic() < end:
                time.sleep(0.01)
        text = stream.getvalue()
        assert ("Packing (" in text) == shows
        assert not shows or text.endswith("\r\x1b[2K")  # it is taken away


def test_short_work_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "_AFTER", 60)
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    with busy("Packing"):
        pass
    assert not screen.getvalue()


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (CommandError("one\ntwo"), 1, "lmdecode x: one two\n"),
        (ValueError("TextModel.load: dtype is 3"), 1, "lmdecode x: dtype is 3\n"),
        (RuntimeError(""), 1, "lmdecode x: RuntimeError\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_told(
    error: BaseException, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def run() -> int:
        raise error

    assert told("lmdecode x", run) == status
    assert capsys.readouterr().err == text


def test_warnings_are_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    def run() -> int:
        warnings.warn("the store\nis gone", RuntimeWarning, stacklevel=1)
        return 0

    assert told("lmdecode x", run) == 0
    assert capsys.readouterr().err == "lmdecode x: the store is gone\n"
