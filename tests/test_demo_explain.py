"""``python -m lmdecode.demo sampling --explain``, in this process."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("transformers")

_SHIPPED = Path(__file__).resolve().parents[1] / "examples" / "kjv_mistral" / "model"


@pytest.fixture
def demo(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``demo(*arguments)``: exit status, what is printed, what goes to stderr."""
    from lmdecode.demo.__main__ import main

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["demo", *arguments])
        try:
            status = main()
        except SystemExit as error:  # of the parser
            status = error.code
        return (status, *capsys.readouterr())

    return run


def test_the_stages_of_one_row(demo: Callable[..., tuple[int, str, str]]) -> None:
    """Each line has what its stage left; the chosen token is one of those that are drawn from."""
    if not (_SHIPPED / "model.safetensors").is_file():
        pytest.skip(f"needs {_SHIPPED}")
    status, printed, errors = demo("sampling", "--explain")
    assert status == 0, errors
    lines = printed.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("stage "))
    assert lines[head].split() == ["stage", "parameter", "tokens", "left"]
    end = lines.index("", head)
    first, *stages = [line.split() for line in lines[head + 2 : end]]
    assert first[0] == "logits"
    assert [stage[:2] for stage in stages] == [
        ["temperature", "0.8"], ["top_k", "200"], ["top_p", "0.98"], ["min_p", "0.005"],
        ["top_n_sigma", "3"], ["epsilon_cutoff", "0.01"], ["typical_p", "0.95"],
    ]  # fmt: skip
    left = [int(line[-1]) for line in (first, *stages)]
    assert left == sorted(left, reverse=True)
    assert left[0] == left[1] > 0 and left[-1] > 0
    last = r"^Chosen: (.+), probability ([\d.]+) of these, ([\d.]+) of all, rank (\d+)\.$"
    chosen = re.search(last, printed, re.MULTILINE)
    assert float(chosen[2]) >= 0.01
    assert int(chosen[4]) <= left[2]
    table = lines[lines.index("Drawn from:") :]
    shares = [float(m[1]) for line in table if (m := re.search(r"^['\"].* +([01]\.\d+)$", line))]
    assert shares == sorted(shares, reverse=True)
    assert len(shares) == min(left[-1], 8)
    if left[-1] <= 8:
        assert abs(sum(shares) - 1) < 0.01
        assert chosen[1] in "".join(table[: len(shares) + 4])


def test_what_explain_does_not_go_with(demo: Callable[..., tuple[int, str, str]]) -> None:
    for arguments, error in (
        (["model"], "--explain is of sampling alone"),
        ([], "--explain is of sampling alone"),
        (["sampling", "--quick"], "--quick is not of sampling --explain"),
        (["sampling", "--plot", "x.png"], "--plot is not of sampling --explain"),
    ):
        status, _, errors = demo(*arguments, "--explain")
        assert status == 2
        assert error in errors
