"""``lmdecode chat``: stores that it cannot open, and talks of the same name in other formats."""

from pathlib import Path

import pytest

import lmdecode
from lmdecode.__main__ import main
from lmdecode.serving import TextModel
from tests.cli.talking import KJV, chat

pytest.importorskip("transformers")
store_module = pytest.importorskip("lmdecode.store")


def _refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a chat that does not begin."""
    capsys.readouterr()  # of what the test did before
    assert main(["chat", *map(str, arguments)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lmdecode chat: ") and error.count("\n") == 1
    return error


def test_stores_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x"
    assert f"--store {path}: " in _refused(capsys, KJV, "--store", path)
    loaded = TextModel.load(KJV)
    fingerprint = loaded.decoding.fingerprint(loaded.tokenizer)
    path = tmp_path / "store"
    store_module.KVStore(path, fingerprint=fingerprint, capacity_bytes=1 << 24).close()
    (path / fingerprint.name / "index.sqlite").write_text("no index")
    assert f"--store {path}: " in _refused(capsys, KJV, "--store", path)


def test_talks_in_other_formats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--store", tmp_path / "store", "--max-tokens", 3]

    def talk(model: Path, session: str, *dtype: str) -> str:
        chat(monkeypatch, ["In the"], model, *options, "--session", session, *dtype)
        return capsys.readouterr().out

    assert "begins anew" not in talk(KJV, "a")
    assert "It goes on behind" in talk(KJV, "a", "--dtype", "int8")
    text = talk(KJV, "a", "--dtype", "bfloat16")
    assert "It begins anew: the talk 'a' there is of " in text and ", int8, " in text
    assert "begins anew" not in talk(KJV, "b", "--dtype", "float32")
    saved = tmp_path / "saved"
    lmdecode.Decoding.from_pretrained(KJV, "bfloat16", keep_model=False).save(saved)
    assert "It goes on behind" in talk(saved, "a", "--dtype", "bf16")


def test_a_model_that_is_none_of_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    error = _refused(capsys, tmp_path, "--store", tmp_path / "store")
    assert "tokenizer.json" in error
    (tmp_path / "tokenizer.json").write_bytes((KJV / "tokenizer.json").read_bytes())
    error = _refused(capsys, tmp_path, "--store", tmp_path / "store")
    assert "has a model of type 'bert'; expected" in error
