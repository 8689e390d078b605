"""The benchmark of decoding runs, by calls and by steps; nothing about speed."""

import pytest

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
pytest.importorskip("transformers")


@needs_benchmarks
@pytest.mark.slow
def test_quick_run() -> None:
    done = run_benchmarks("decoder/", "--quick")
    assert done.returncode == 0, done.stderr
    for name in ("a step of translation", "translate 32 tokens"):
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} ")]
        assert len(rows) == 3 and all("x |" in row for row in rows), done.stdout
