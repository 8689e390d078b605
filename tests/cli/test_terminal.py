"""What a terminal gets beside a command's output, and nothing else does."""

import io
import sys
import time

import pytest

from lmdecode.cli import terminal
from lmdecode.cli.errors import CommandError, told
from lmdecode.cli.terminal import busy


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
