"""vLLM's KV cache on disk, in vLLM's engine, on the shipped model: processes that come and go."""

import os
import shutil
import signal
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from engines import MODEL, finish, job_of, needs_engine, prompt_of, request, run, start

from lmdecode.store import KVStore
from lmdecode.store.__main__ import main as store_main
from lmdecode.store.fingerprint import Fingerprint

pytestmark = [needs_engine, pytest.mark.slow]

BLOCK = 32
# The model's window of 128 tokens is shorter than most prompts; these are read in chunks.
ENGINE = {"block_size": BLOCK, "max_num_batched_tokens": 256, "max_num_seqs": 16}
LENGTHS = (5, 31, 32, 33, 64, 65, 100, 128, 129, 160, 200, 257, 300, 333, 384, 400)
BATCH = [request(prompt_of(n, n), 20, temperature=0.0) for n in LENGTHS]
ALL = [(n - 1) // BLOCK * BLOCK for n in LENGTHS]  # one token is left to compute


def job(
    path: Path, batches: list[Any] | None = None, is_async: bool = False, **engine: Any
) -> dict[str, Any]:
    transfer = {
        "kv_connector": "LmdecodeConnector",
        "kv_connector_module_path": "lmdecode.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"path": str(path), "capacity_bytes": 1 << 28},
    }
    options = engine.pop("options", {})
    transfer["kv_connector_extra_config"] |= options  # type: ignore[operator]
    whole = ENGINE | {"kv_transfer_config": transfer} | engine
    return job_of(whole, [BATCH] if batches is None else batches, is_async)


def tokens(report: dict[str, Any], batch: int = 0) -> list[list[int]]:
    return [one["tokens"] for one in report["batches"][batch]]


def cached(report: dict[str, Any], batch: int = 0) -> list[int]:
    return [one["cached"] for one in report["batches"][batch]]


def only(path: Path) -> Path:
    (folder,) = path.iterdir()
    return folder


def entries(path: Path) -> int:
    with sqlite3.connect(f"file:{only(path)}/index.sqlite?mode=ro", uri=True) as index:
        (count,) = index.execute("SELECT count(*) FROM areas WHERE count > 0").fetchone()
    return int(count)


def entries_so_far(path: Path) -> int:
    """Of a store that another process may just be making."""
    try:
        return entries(path) if path.exists() else 0
    except (sqlite3.OperationalError, ValueError):  # no table, no folder of the model
        return 0


def verify(path: Path) -> None:
    assert store_main(["verify", str(path)]) == 0


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What vLLM answers without a store."""
    report = run(job_of(ENGINE, [BATCH]))
    assert cached(report) == [0] * len(BATCH)
    return tokens(report)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory, expected: list[list[int]]) -> Path:
    path = tmp_path_factory.mktemp("filled") / "store"
    report = run(job(path))
    assert tokens(report) == expected
    assert cached(report) == [0] * len(BATCH)
    verify(path)
    # Blocks of answers too: the last token is never computed with.
    assert entries(path) == sum((n + 19) // BLOCK for n in LENGTHS)
    return path


@pytest.fixture
def copy(filled: Path, tmp_path: Path) -> Path:
    shutil.copytree(filled, tmp_path / "store")
    return tmp_path / "store"


@pytest.mark.parametrize("is_async", [False, True], ids=["one process", "scheduler and worker"])
def test_after_a_restart_blocks_come_from_the_store(
    is_async: bool, copy: Path, expected: list[list[int]]
) -> None:
    before = entries(copy)
    report = run(job(copy, is_async=is_async))
    assert tokens(report) == expected
    assert cached(report) == ALL
    assert entries(copy) == before
    verify(copy)


def test_an_answer_is_found_as_a_part_of_the_next_prompt(
    copy: Path, expected: list[list[int]]
) -> None:
    turns = [
        request([*one["prompt"], *answer, *prompt_of(5, 77)], 8, temperature=0.0)
        for one, answer in zip(BATCH, expected, strict=True)
    ]
    report = run(job(copy, [turns]))
    assert cached(report) == [(n + 19) // BLOCK * BLOCK for n in LENGTHS]
    assert tokens(report) == tokens(run(job_of(ENGINE, [turns])))


def changed_model(folder: Path) -> Path:
    """Another model of the same shape: one number of one weight differs."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("other", ["model", "block size", "dtype", "tenant"])
def test_another_configuration_never_hits(other: str, copy: Path, tmp_path: Path) -> None:
    engine: dict[str, Any] = {
        "model": lambda: {"model": str(changed_model(tmp_path / "model"))},
        "block size": lambda: {"block_size": 2 * BLOCK},
        "dtype": lambda: {"dtype": "bfloat16"},
        "tenant": lambda: {"options": {"salt": "another"}},
    }[other]()
    report = run(job(copy, **engine))
    assert cached(report) == [0] * len(BATCH)
    assert len(list(copy.iterdir())) == (1 if other == "tenant" else 2)
    verify(copy)


def test_a_full_store(tmp_path: Path, expected: list[list[int]]) -> None:
    path = tmp_path / "store"
    for _ in range(2):
        report = run(job(path, options={"capacity_bytes": 5 * 69632}))
        assert tokens(report) == expected
        assert entries(path) == 5
        verify(path)


def damage(path: Path, every: int) -> int:
    """Flip a byte in the planes of every so many-th slot."""
    (slab,) = only(path).glob("slab-*")
    content = bytearray(slab.read_bytes())
    slots = range(0, len(content), 69632)[::every]
    for slot in slots:
        content[slot + 40_000] ^= 1
    slab.write_bytes(content)
    return len(slots)


def writer(path: Path) -> KVStore:
    """Open the store as another process of vLLM would."""
    fingerprint = Fingerprint.decoded((only(path) / "fingerprint.json").read_bytes())
    return KVStore(
        path, fingerprint=fingerprint, capacity_bytes=1 << 28, v_layout="row", chunk_tokens=BLOCK
    )


@pytest.mark.parametrize(
    ("every", "is_async"), [(1, False), (7, True)], ids=["one process", "scheduler and worker"]
)
def test_damaged_blocks(every: int, is_async: bool, copy: Path, expected: list[list[int]]) -> None:
    damaged = damage(copy, every)
    assert damaged > 5
    assert store_main(["verify", str(copy)]) == 1
    report = run(job(copy, is_async=is_async))
    assert tokens(report) == expected
    # What was met of it has been stored anew. Behind a window nobody looks.
    again = run(job(copy))
    assert tokens(again) == expected and cached(again) == ALL
    with writer(copy) as store:
        assert len(store.verify().damage) < damaged
    verify(copy)


def test_a_damaged_index(copy: Path, expected: list[list[int]]) -> None:
    for file in only(copy).glob("index.sqlite*"):
        file.write_bytes(b"nothing of SQLite" * 1000)
    report = run(job(copy))
    assert tokens(report) == expected
    assert "LmdecodeConnector" in report["errors"]


def test_a_store_that_can_only_be_read(copy: Path, expected: list[list[int]]) -> None:
    before = entries(copy)
    more = [request(prompt_of(200, 5000 + i), 4, temperature=0.0) for i in range(4)]
    with writer(copy):
        report = run(job(copy, [BATCH, more]))
    assert tokens(report) == expected
    assert cached(report) == ALL
    assert entries(copy) == before
    assert "does not write its store" in report["errors"]


def test_two_processes(tmp_path: Path, expected: list[list[int]]) -> None:
    path = tmp_path / "store"
    both = [start(job(path, [part, BATCH]), {}) for part in (BATCH[:8], BATCH[8:])]
    for process in both:
        report = finish(process)
        assert tokens(report, 1) == expected
    verify(path)
    report = run(job(path))
    assert tokens(report) == expected
    verify(path)
    assert cached(run(job(path))) == ALL


def test_killed_in_the_middle(tmp_path: Path, expected: list[list[int]]) -> None:
    path = tmp_path / "store"
    many = [request(prompt_of(300, 9000 + i), 100, temperature=0.0) for i in range(2000)]
    process = start(job(path, [BATCH, many], is_async=True), {})
    try:
        deadline = time.monotonic() + 400
        while entries_so_far(path) < 300:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    verify(path)
    report = run(job(path))
    assert tokens(report) == expected
    assert cached(report) == ALL
    verify(path)


def test_wrong_options_are_told_before_anything_is_computed(tmp_path: Path) -> None:
    process = start(job(tmp_path, options={"capacity": 1}), {})
    _, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "LmdecodeConnector: capacity is no option; expected path, capacity_bytes" in errors
