"""Engines of vLLM in processes of their own, for tests that ``make test-vllm`` runs."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples/kjv_mistral/model"
VOCAB = 4096

needs_engine = pytest.mark.skipif(
    os.environ.get("LMDECODE_TEST_VLLM") != "1", reason="make test-vllm runs it"
)

_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
}  # fmt: skip
_ENGINE = {
    "model": str(MODEL), "dtype": "float32", "enforce_eager": True, "max_model_len": 512,
    "disable_log_stats": True,
}  # fmt: skip


def job_of(engine: dict[str, Any], batches: list[Any], is_async: bool = False) -> dict[str, Any]:
    return {"engine": _ENGINE | engine, "batches": batches, "is_async": is_async}


def start(job: dict[str, Any], environment: dict[str, str]) -> subprocess.Popen[str]:
    """Start a process with a job; it is in a group of its own, to be killed with its children."""
    # One process, for speed; an asynchronous engine has those that vLLM gives it.
    own = {} if job["is_async"] else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("engine_job.py"))],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, **_ENVIRONMENT, **own, **environment}, start_new_session=True,
    )  # fmt: skip
    process.stdin.write(json.dumps(job))
    process.stdin.close()
    process.stdin = None
    return process


def run(job: dict[str, Any], **environment: str) -> dict[str, Any]:
    """Run a job to its end, and return its report and, as "errors", what it wrote beside."""
    return finish(start(job, environment))


def finish(process: subprocess.Popen[str]) -> dict[str, Any]:
    output, errors = process.communicate(timeout=570)
    assert process.returncode == 0, errors[-6000:]
    report: dict[str, Any] = json.loads(output.splitlines()[-1])
    return report | {"errors": errors}


def request(prompt: list[int], max_tokens: int, **params: Any) -> dict[str, Any]:
    return {"prompt": prompt, "params": {"max_tokens": max_tokens, "ignore_eos": True} | params}


def prompt_of(length: int, seed: int) -> list[int]:
    """Tokens of a prompt, without special ones."""
    return [0, *random.Random(seed).choices(range(3, VOCAB), k=length - 1)]
