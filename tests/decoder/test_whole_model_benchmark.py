"""The benchmark of whole models: its engines, and that they run the same model; no speed."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
pytest.importorskip("transformers")
np = pytest.importorskip("numpy")

_ROOT = Path(__file__).resolve().parents[2]
pytestmark = needs_benchmarks


@pytest.fixture
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))


@pytest.mark.slow
def test_quick_run() -> None:
    done = run_benchmarks("whole_model", "--quick")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for name in ("prefill", "a step", "generate, greedy", "generate, 4 beams"):
        rows = [line for line in lines if line.startswith(f"| {name} ") and " float32 " in line]
        assert rows and all("x transformers |" in row for row in rows), done.stdout
    assert not [line for line in lines if "logits differ" in line], done.stdout
    tables = [line for line in lines if line.startswith("| tiny ")]
    assert len([line for line in tables if "lmdecode" in line]) == 2, done.stdout


@pytest.mark.usefixtures("from_root")
def test_an_engine_of_another_model_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.decoder.whole_model.engines import Engines
    from benchmarks.decoder.whole_model.worker import agreement

    expected = np.random.default_rng(0).normal(size=500).astype(np.float32)
    other = expected + np.float32(0.002) * (np.arange(500) == 7)
    engines = Engines()
    assert engines.agrees("same", "float32", agreement(expected + 1e-4, expected))
    assert not engines.agrees("other", "float32", agreement(other, expected))
    assert engines.agrees("rounded", "int8", agreement(other, expected))
    assert not engines.agrees("reversed", "int8", agreement(expected[::-1], expected))
    assert set(engines.left_out) == {"other", "reversed"}
    assert "without other: logits differ by 0.002" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"logits have shape \(499,\); expected \(500,\)"):
        agreement(expected[1:], expected)


@pytest.mark.usefixtures("from_root")
@pytest.mark.slow
def test_an_engine_answers_from_a_process_of_its_own(tmp_path: Path) -> None:
    from benchmarks.decoder.whole_model.process import EngineProcess, python_of

    python = python_of("no such environment", ("torch", "transformers"))
    assert python is not None and python_of("no such environment", ("no_such_package",)) is None
    setup: dict[str, Any] = {"module": "transformers_engine", "folder": str(tmp_path / "none")}
    setup |= {"number_format": "float32", "threads": 1, "longest": 8, "expected": ""}
    process = EngineProcess(python, setup)
    with pytest.raises(RuntimeError, match="none"):
        process.about()
    process.close()


@pytest.mark.usefixtures("from_root")
def test_rows_are_ordered_for_rotations_of_neighbours() -> None:
    """Halves of a head rotate in transformers, neighbouring pairs in GGUF's llama."""
    from benchmarks.decoder.whole_model.gguf_file import _neighbours

    rows = np.arange(12).reshape(12, 1)
    assert _neighbours(rows, 2).ravel().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


@pytest.mark.usefixtures("from_root")
def test_frequency_factors_are_those_of_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from benchmarks.decoder.whole_model import models
    from benchmarks.decoder.whole_model.gguf_file import _frequency_factors

    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](models.make_config("B"), "cpu")
    plain = 5e5 ** (-np.arange(0, 64, 2) / 64)
    found = plain / _frequency_factors(models.MODELS["B"], 64)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)
