"""The benchmark of ``Sampler``: its table, and that peers do the same work; nothing about speed."""

import importlib
from pathlib import Path

import pytest
import torch

import lmdecode
from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
pytest.importorskip("transformers")

pytestmark = [needs_benchmarks, pytest.mark.slow]

_ROOT = Path(__file__).resolve().parents[2]
INF = float("inf")


@pytest.fixture(autouse=True)
def _from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))


def test_a_quick_run_has_every_case() -> None:
    done = run_benchmarks("Sampler/", "--quick")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    table = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
    stages = [f"{name} alone" for name in "typical epsilon eta n-sigma XTC mirostat".split()]
    edited = "a step, penalties, biases, mask, k+p+min-p"
    verified = "verify 8 drafted tokens, k+p"
    assert list(table) == ["a step, k+p", edited, *stages, verified]
    for name in ("a step, k+p", edited, *stages[:3]):
        assert table[name]["transformers"].endswith("x")
    assert table[edited]["k+p alone"].endswith("x")
    assert table[verified]["sampling the rows"].endswith("x")


@pytest.mark.parametrize("dialect", ["transformers", "llama.cpp", "vllm"])
def test_peers_with_edits_draw_from_the_tokens_that_ours_keeps(dialect: str) -> None:
    from benchmarks.sampling import bench_sampler, sampler_peers

    if dialect == "vllm":
        reason = "vLLM is not installed"
        pytest.importorskip("vllm.v1.sample.sampler", reason=reason, exc_type=ImportError)
    elif dialect == "llama.cpp":
        pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    torch.manual_seed(0)
    vocab, draws = 4000, 400
    edits = bench_sampler._edits(vocab)
    counts = {"frequency_penalty": edits.frequency, "presence_penalty": edits.presence}
    sampler = lmdecode.Sampler(
        1, vocab, dialect=dialect, return_logits=True, seed=1, top_k=30, top_p=0.8, min_p=0.1,
        repetition_penalty=edits.repetition, logit_bias=edits.biases,
        **({} if dialect == "transformers" else counts),
    )  # fmt: skip
    sampler.insert(0, prompt=edits.prompt)
    sampler.accept(0, edits.output)
    mask = None if dialect == "llama.cpp" else bench_sampler.bitmask_of(edits.allowed)[None]
    row = torch.randn(1, vocab) * 2
    kept = sampler.sample(row, mask).kept_logits[0]
    build = {
        "transformers": sampler_peers.transformers_with_edits,
        "llama.cpp": sampler_peers.llama_with_edits,
        "vllm": sampler_peers.vllm_with_edits,
    }[dialect]
    tokens = build(row.expand(draws, -1), edits, 30, 0.8, 0.1)().flatten()
    assert len(tokens) == draws
    assert (kept[tokens.long()] > -INF).all()
    top = kept.argmax()
    expected = kept.softmax(-1)[top] * draws
    assert abs((tokens == top).sum() - expected) < 6 * expected.sqrt()


def test_a_bitmask_has_a_bit_for_each_allowed_token() -> None:
    bitmask_of = importlib.import_module("benchmarks.sampling.bench_sampler").bitmask_of
    allowed = torch.zeros(70, dtype=torch.bool)
    allowed[[3, 63, 69]] = True
    assert bitmask_of(allowed).tolist() == [1 << 3, -(1 << 31), 1 << 5]
