"""What `make gpu` runs: the CUDA ops against the CPU ops bit by bit, the tests, and timings.

Writes benchmarks/results/gpu.md. Needs a CUDA device and the torch of that machine; nothing else.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

import lmdecode
from lmdecode import sliding_window_attention as attend
from tests.support.cases import beam_cases, bits, sampling_cases

RESULTS = Path(__file__).parent / "results" / "gpu.md"


def compare(count: int) -> tuple[int, list[str]]:
    """Run ``count`` random cases of each op on both devices: (rows compared, cases that differ)."""
    pairs = [
        *((case, lmdecode.top_k_top_p_sample) for case in sampling_cases(1, count)),
        *((case, lmdecode.log_softmax_top_k) for case in beam_cases(1, count)),
    ]
    rows, different = 0, []
    for case, op in pairs:
        on_cpu, on_cuda = case.call(op), case.to("cuda").call(op)
        rows += len(case.logits)
        for ours, theirs in zip(on_cpu, on_cuda, strict=True):
            if ours is not None and not torch.equal(bits(ours), bits(theirs.cpu())):
                different.append(case.name)
                break
    return rows, different


def microseconds(call: Callable[[], object], rounds: int = 20, calls: int = 10) -> float:
    """Median time of a call on the device, by CUDA events around runs of ``calls``."""
    for _ in range(3):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[rounds // 2]


def chain(x: torch.Tensor) -> torch.Tensor:
    """Top-k 50, top-p 0.9, softmax and multinomial in plain torch, topk first."""
    values, tokens = x.float().topk(50, -1)
    probabilities = values.softmax(-1)
    dropped = probabilities.cumsum(-1) - probabilities >= 0.9
    drawn = torch.multinomial(probabilities.masked_fill(dropped, 0), 1)
    return tokens.gather(-1, drawn)


def timings() -> list[str]:
    """Rows of the table of times, as markdown."""
    sample = lmdecode.top_k_top_p_sample
    lines = [
        "| logits | one copy | k 50, p 0.9 | with kept | p 0.9 | torch, topk first | torch.sort |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for batch, vocab in ((1, 128256), (64, 128256), (512, 131072)):
            torch.manual_seed(0)
            x = (torch.randn(batch, vocab, device="cuda") * 3).to(dtype)
            seeds = torch.arange(batch, device="cuda")
            out = torch.empty_like(x)
            calls: list[Callable[[], object]] = [
                lambda x=x, out=out: out.copy_(x),
                lambda x=x, s=seeds: sample(x, top_k=50, top_p=0.9, seed=s),
                lambda x=x, s=seeds: sample(x, top_k=50, top_p=0.9, seed=s, return_logits=True),
                lambda x=x, s=seeds: sample(x, top_p=0.9, seed=s),
                lambda x=x: chain(x),
                lambda x=x: torch.sort(x, -1),
            ]
            name = f"{batch} x {vocab} {str(dtype).removeprefix('torch.')}"
            times = " | ".join(f"{microseconds(call):.1f}" for call in calls)
            lines.append(f"| {name} | {times} |")
    return lines


def attention_timings() -> list[str]:
    """Rows of the table of attention, as markdown: ours, torch's, and the rate that ours is."""

    def heads(count: int, batch: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(batch, count, tokens, 128, device="cuda").to(dtype)

    lines = ["| attention, 32/8 heads of 128 | ours | torch SDPA | |", "|---|---|---|---|"]
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        for tokens, window in ((4096, None), (4096, 1024), (16384, 1024)):
            if dtype == torch.float32 and tokens > 4096:
                continue
            q, k, v = (heads(n, 1, tokens, dtype) for n in (32, 8, 8))
            ours = microseconds(lambda a=(q, k, v), w=window: attend(*a, window=w))
            theirs = microseconds(
                lambda a=(q, k, v): scaled_dot_product_attention(
                    *a, is_causal=True, enable_gqa=True
                )
            )
            seen = min(window or tokens, tokens)
            pairs = seen * (seen + 1) // 2 + (tokens - seen) * seen
            rate = 4 * 128 * 32 * pairs / ours / 1e6
            lines.append(
                f"| {name}, {tokens} tokens, window {window} | {ours:.1f} "
                f"| {theirs:.1f}, causal | {rate:.1f} TFLOP/s |"
            )
        for batch, keys in ((1, 4096), (32, 4096), (1, 131072)):
            q, k, v = (heads(n, batch, t, dtype) for n, t in ((32, 1), (8, keys), (8, keys)))
            out = torch.empty_like(k)
            ours = microseconds(lambda a=(q, k, v): lmdecode.sliding_window_decode(*a))
            theirs = microseconds(
                lambda a=(q, k, v): scaled_dot_product_attention(*a, enable_gqa=True)
            )
            copy = microseconds(lambda o=out, k=k: o.copy_(k))
            rate = 2 * k.numel() * k.element_size() / ours / 1e6
            lines.append(
                f"| {name}, one token, {batch} x {keys} keys | {ours:.1f} "
                f"| {theirs:.1f} | {rate:.2f} TB/s; a copy of K takes {copy:.1f} |"
            )
    return lines


def main() -> int:
    """Compare, test, time and write the report; 1 where anything differs or fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=3000, help="random cases to compare")
    parser.add_argument("--no-tests", action="store_true", help="leave pytest out")
    arguments = parser.parse_args()
    if not (lmdecode.has_cuda() and torch.cuda.is_available()):
        print("lmdecode: no CUDA device, or lmdecode was built without nvcc", file=sys.stderr)
        return 1
    rows, different = compare(arguments.cases)
    tests = "not run"
    failed = False
    if not arguments.no_tests and importlib.util.find_spec("pytest"):
        folders = ["tests/sampling", "tests/beam", "tests/kv_cache", "tests/attention"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-k", "cuda", *folders],
            capture_output=True,
            text=True,
        )
        tests = (run.stdout.strip().splitlines() or ["no output"])[-1]
        failed = run.returncode not in (0, 5)
    report = [
        "# On a GPU",
        "",
        f"{datetime.date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, python {platform.python_version()}, "
        f"lmdecode {lmdecode.__version__}",
        "",
        f"- CUDA against CPU, bit by bit: {rows} rows in {arguments.cases} cases of each op, "
        f"{len(different)} cases differ",
        *(f"  - {name}" for name in different[:20]),
        f"- tests: {tests}",
        "",
        "Microseconds a call, median, by CUDA events:",
        "",
        *timings(),
        "",
        *attention_timings(),
        "",
    ]
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("\n".join(report))
    print("\n".join(report))
    return int(bool(different) or failed)


if __name__ == "__main__":
    sys.exit(main())
