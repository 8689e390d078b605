"""The benchmark of ring caches runs, and its peers do the same work; nothing about speed."""

import pytest
import torch

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
pytest.importorskip("transformers", minversion="5.0")

pytestmark = needs_benchmarks


@pytest.mark.slow
def test_quick_run() -> None:
    done = run_benchmarks("ring cache/", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| update")]
    assert len(rows) == 4 and all(row.count("x |") == 3 for row in rows), done.stdout
    assert all("%" in row for row in rows[:2])


def test_peers_of_the_update_hold_the_same() -> None:
    from benchmarks.kv_cache import bench_ring_cache as bench

    layers = [bench._full_layer(name, 20, 2) for name in (bench.OURS, bench.DYNAMIC, bench.STATIC)]
    token = bench._token(2, bench.KV_HEADS)
    for _ in range(3):
        ours, dynamic, static = (layer.update(token, token) for layer in layers)
        for got, one, other in zip(ours, dynamic, static, strict=True):
            assert torch.equal(got, one) and torch.equal(got, other)


def test_peers_of_a_step_attend_to_the_same() -> None:
    from benchmarks.kv_cache import bench_ring_cache as bench

    contestants = bench._step_contestants(True, window=100, rows=2)
    assert len(contestants) == 4
    for _ in range(2):
        want, *others = (contestant.call() for contestant in contestants)
        for other in others:
            torch.testing.assert_close(other, want, atol=2e-2, rtol=2e-2)
