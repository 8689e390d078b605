"""The benchmark of linear layers runs, and its peers do the same work; nothing about speed."""

import pytest

from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")

pytestmark = needs_benchmarks


@pytest.mark.slow
def test_quick_run() -> None:
    done = run_benchmarks("packed_linear", "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "int8" in line]
    assert len(rows) == 2 and all(row.count("x |") >= 1 for row in rows), done.stdout


@pytest.mark.parametrize("dtype", ["f32", "bf16", "int8"])
def test_peers_do_the_same(dtype: str) -> None:
    from benchmarks.linear import bench_packed_linear as bench

    sizes = dict(rows=5, inputs=70, outputs=130, dtype=dtype, threads=None)
    contestants = [c for c in bench._contestants(True, **sizes) if c.name != "limit"]
    assert len(contestants) == (3 if dtype != "int8" and bench.has_onednn(dtype) else 2)
    want = contestants[0].call()
    for contestant in contestants[1:]:
        error = (contestant.call().float() - want).abs().max() / want.abs().max()
        assert error < {"f32": 1e-5, "bf16": 1e-2, "int8": 4e-2}[dtype]


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_peers_of_norms_do_the_same(norm: str) -> None:
    from benchmarks.linear import bench_norms as bench

    ours, _, peer = bench._contestants(True, norm=norm, rows=5, size=70)
    assert (ours.call() - peer.call()).abs().max() < 1e-5
    assert len(bench.cases(quick=True)) == 2
