"""The example scripts, as a user runs them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def _run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(
    not (EXAMPLES / "kjv_mistral" / "model" / "model.safetensors").is_file(),
    reason="needs the shipped model",
)
def test_beam_search_batching() -> None:
    """Four requests that overlap, each as ``generate()`` has it alone."""
    out = _run("beam_search_batching.py", "--check")
    assert out.count("rows left, request ") == out.count("  equal to generate()") == 4, out
    assert "DIFFERENT" not in out
    steps = [int(line.split()[1].rstrip(",")) for line in out.splitlines() if "rows left" in line]
    assert len(set(steps)) > 1  # they do not leave together
