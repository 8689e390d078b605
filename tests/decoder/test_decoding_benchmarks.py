"""The benchmarks of decoding runs, by calls and by steps, and of encoders; nothing about speed."""

import pytest

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
pytest.importorskip("transformers")


@needs_benchmarks
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "names"),
    [
        ("decoder/", ("a step of translation", "translate 32 tokens")),
        ("encoder/", ("sentences of 20 to 40 tokens", "frames of speech")),
    ],
)
def test_quick_run(group: str, names: tuple[str, ...]) -> None:
    done = run_benchmarks(group, "--quick")
    assert done.returncode == 0, done.stderr
    for name in names:
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} ")]
        assert len(rows) == 3 and all("x |" in row for row in rows), done.stdout
