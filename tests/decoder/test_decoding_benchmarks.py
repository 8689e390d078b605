"""The benchmark of decoding runs, by calls and by steps; nothing about speed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    not (ROOT / "benchmarks").is_dir(), reason="benchmarks are in source checkouts only"
)
def test_quick_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "decoder/", "--quick"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for name in ("a step of translation", "translate 32 tokens"):
        rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {name} ")]
        assert len(rows) == 3 and all("x |" in row for row in rows), done.stdout
