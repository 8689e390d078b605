"""The benchmarks of attention run, and their peers do the same work; nothing about speed."""

import re
import sys
from collections.abc import Callable

import pytest
import torch

import lmdecode
from lmdecode.demo.peak_memory import peak_memory as peak_memory_of
from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")

pytestmark = needs_benchmarks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sliding_window_attention", "sliding_window_decode"])
def test_quick_run(name: str) -> None:
    done = run_benchmarks(name, "--quick")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "bf16" in line]
    assert len(rows) == 1 and rows[0].count("x |") >= 3, done.stdout


@pytest.mark.slow
def test_quick_run_of_generate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from benchmarks.__main__ import main
    from benchmarks.attention import bench_generate_window as bench

    measured: list[object] = []

    def peak_memory(build: Callable[..., Callable[[], object]], name: str, *sizes: object) -> int:
        """Measure ours alone: each process that does so loads transformers again."""
        measured.append(name)
        if name != "lmdecode":
            build(name, *sizes)()
            return 1_000_000
        return peak_memory_of(build, name, *sizes)

    monkeypatch.setattr(bench, "peak_memory", peak_memory)
    monkeypatch.setattr(sys, "argv", ["benchmarks", "prompt and 2 tokens", "--quick"])
    assert main() == 0
    printed = capsys.readouterr().out
    assert re.search(r"256 tokens, f32: lmdecode \d+ MB, sdpa 1 MB, eager 1 MB\.", printed)
    row = next(line for line in printed.splitlines() if line.startswith("| prompt and 2"))
    assert row.count("x |") == 2, row
    assert measured == ["lmdecode", "sdpa", "eager"]


def test_implementations_generate_the_same() -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from benchmarks.attention import bench_generate_window as bench

    for dtype in bench.DTYPES:
        sizes = dict(tokens=100, window=16, dtype=dtype)
        calls = [bench._call(name, **sizes) for name in ("lmdecode", bench.SDPA, bench.EAGER)]
        ours, *others = (call() for call in calls)
        assert ours.shape == (1, 102)
        assert dtype != "f32" or all(torch.equal(ours, other) for other in others)


def test_peers_of_prefill_do_the_same() -> None:
    from benchmarks.attention import bench_sliding_window_attention as bench

    for window in (70, 512):
        contestants = bench._contestants(True, tokens=512, window=window, dtype="f32", threads=1)
        outputs = {c.name: c.call() for c in contestants if c.complete}
        assert len(outputs) == (4 if window < 512 else 5)
        for out in outputs.values():
            torch.testing.assert_close(out, outputs["lmdecode"], rtol=1e-4, atol=1e-5)


def test_peers_of_decoding_do_the_same() -> None:
    from benchmarks.attention import bench_sliding_window_decode as bench

    sizes = dict(batch=2, length=300, heads=8, kv_heads=2, dtype="f32")
    contestants = [c for c in bench._contestants(True, **sizes) if c.name != "limit"]
    assert len(contestants) == 4
    want = contestants[0].call()
    for contestant in contestants[1:]:
        torch.testing.assert_close(contestant.call(), want, rtol=1e-4, atol=1e-5)


def test_operations_of_visible_pairs() -> None:
    from benchmarks.attention.bench_sliding_window_attention import HEADS, useful_operations

    for tokens, window in ((9, 4), (9, 9), (9, 20)):
        pairs = int((~lmdecode.swa_mask(tokens, window, form="bool")).sum())
        assert useful_operations(tokens, window) == 4 * 128 * HEADS * pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_peer_of_merging_does_the_same(dtype: torch.dtype) -> None:
    from benchmarks.attention import bench_merge_attention_states as bench

    ours, _, peer = bench._contestants(True, dtype=dtype, heads=3, tokens=5)
    for found, expected in zip(ours.call(), peer.call(), strict=True):
        torch.testing.assert_close(found, expected)
    assert len(bench.cases(quick=True)) == 2
