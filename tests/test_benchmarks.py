"""The benchmark program: its tables, files and peers; nothing about speed."""

import importlib
import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lmdecode
from lmdecode.demo.peak_memory import peak_memory
from tests.support.anonymous_memory import peak_without_files
from tests.support.benchmark_runs import needs_benchmarks, run_benchmarks

pytest.importorskip("tqdm")
timing = pytest.importorskip("benchmarks.timing", reason="benchmarks are in source checkouts only")

_ROOT = Path(__file__).resolve().parents[1]
pytestmark = needs_benchmarks


def _table(text: str) -> list[dict[str, str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows]


@pytest.mark.slow
def test_quick_run_writes_table_json_and_plot(tmp_path: Path) -> None:
    page, figures, chart = tmp_path / "page.md", tmp_path / "figures.json", tmp_path / "chart.png"
    page.write_text(
        "Before.\n\n<!-- results: written by python -m benchmarks -->\nstale figures\n"
        "<!-- end of results -->\n\nAfter.\n"
    )
    plot = ["--plot", chart] if _has_matplotlib() else []
    files = ["--output", page, "--json", figures, *plot]
    done = run_benchmarks("/k+p B", "tiny row", "--quick", *files)
    assert done.returncode == 0, done.stderr
    rows = _table(done.stdout)
    assert [(row["case"], row["caches"]) for row in rows] == [
        ("k+p", "warm"), ("k+p", "cold"), ("k+p, tiny row", "warm"), ("k+p, tiny row", "all cold"),
    ]  # fmt: skip
    for row in rows:
        assert row["of limit"].endswith("%")
        best = row["best peer"].split(maxsplit=1)[1]
        assert best in ("plain torch", "vLLM torch", "transformers", "llama.cpp")
        assert float(row["ours us (median)"].split()[0]) > 0
    assert rows[0]["vLLM torch"].endswith("x")
    assert rows[1]["vLLM torch"] == "-"

    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "stale" not in text
    assert _table(text) == rows
    record = json.loads(figures.read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert record["results"][0]["case"] == ("top_k_top_p_sample/k+p B=8 V=32000 dtype=f32 warm")
    times = record["results"][0]["times"]
    assert times["lmdecode"]["minimum_us"] <= times["lmdecode"]["median_us"]
    if plot:
        assert chart.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("from_root")
def test_a_run_that_is_cut_off_leaves_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import __main__, harness, report

    def cut_off(cases: list[Any], *_: Any) -> Iterator[Any]:
        assert len(cases) > 2
        for case, seconds in zip(cases[:2], (1e-6, 3e-6), strict=True):
            timings = {harness.OURS: timing.Timing((seconds,)), "peer": timing.Timing((2e-6,))}
            yield harness.Result(case, 1, timings, dict.fromkeys(timings, True))
        raise KeyboardInterrupt

    page = tmp_path / "page.md"
    monkeypatch.setattr(__main__, "run_cases", cut_off)
    monkeypatch.setattr("sys.argv", ["benchmarks", "reorder_cache_/", "--output", str(page)])
    with pytest.raises(KeyboardInterrupt):
        __main__.main()
    (section,) = report.sections(page.read_text()).values()
    assert [row["peer"] for row in _table(section.rpartition("Cases:")[2])] == ["2.00x", "0.67x"]


@pytest.mark.usefixtures("from_root")
def test_a_run_of_all_cases_writes_a_table_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import __main__, discovery, harness, report

    def timed(cases: list[Any], *_: Any) -> Iterator[Any]:
        for case in cases:
            timings = {harness.OURS: timing.Timing((1e-6,))}
            yield harness.Result(case, 1, timings, dict.fromkeys(timings, True))

    groups = {case.group for found in discovery.discover() for case in found.cases(True)}
    assert {"engine", "generate"} < groups  # two of one benchmark, with other columns
    page = tmp_path / "page.md"
    monkeypatch.setattr(__main__, "run_cases", timed)
    monkeypatch.setattr("sys.argv", ["benchmarks", "--quick", "--output", str(page)])
    assert __main__.main() == 0
    assert report.sections(page.read_text()).keys() == groups


def _has_matplotlib() -> bool:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.slow
def test_quick_run_of_the_cache_benchmark() -> None:
    done = run_benchmarks("reorder_cache_/[B, H, S, D] ", "--quick")
    assert done.returncode == 0, done.stderr
    rows = _table(done.stdout)
    assert [row["moved"] for row in rows] == ["0", "8"]
    assert rows[0]["of limit"] == "-"
    assert rows[1]["of limit"].endswith("%")
    for row in rows:
        assert row["index_select out="].endswith("x")


@pytest.mark.usefixtures("from_root")
def test_a_step_is_what_it_adds_to_a_shorter_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import harness

    seconds = {"long": (9.0, 7.0), "short": (3.0, 4.0), "whole": (5.0,)}
    monkeypatch.setattr(
        harness,
        "interleaved",
        lambda calls, **_: {name: timing.Timing(seconds[call()]) for name, call in calls.items()},
    )
    contestants = [
        harness.Contestant(harness.OURS, lambda: "long", shorter=(lambda: "short", 2)),
        harness.Contestant("peer", lambda: "whole"),
    ]
    case = harness.Case("group", "name", {}, lambda with_peers: contestants)
    result = harness.run_case(case, harness.QUICK, 1, evictor=None)
    assert result.timings == {
        harness.OURS: timing.Timing((3.0, 2.0)),
        "peer": timing.Timing((5.0,)),
    }
    assert result.ratio("peer") == 2.5


@pytest.mark.slow
def test_unknown_case_is_an_error() -> None:
    done = run_benchmarks("no such case")
    assert done.returncode == 2
    assert "no case has no such case in its name" in done.stderr


@pytest.fixture
def from_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("from_root")
@pytest.mark.parametrize(("top_k", "top_p"), [(50, 0.9), (None, 0.3), (None, 0.9), (7, None)])
@pytest.mark.parametrize("peer", ["transformers_chain", "vllm_torch", "plain_torch"])
def test_peers_draw_from_the_tokens_that_ours_keeps(
    peer: str, top_k: int | None, top_p: float | None
) -> None:
    from benchmarks.sampling import peers

    if peer == "transformers_chain":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    row = torch.randn(1, 3000) * 3
    out = lmdecode.top_k_top_p_sample(row, top_k, top_p, greedy=True, return_logits=True)
    kept = out.kept_logits[0]
    probability = kept.softmax(-1)
    draws = 2000
    step = getattr(peers, peer)(row.expand(draws, -1), peers.Filter(top_k, top_p, None))
    tokens = step().flatten()
    assert len(tokens) == draws
    assert torch.isfinite(kept[tokens]).all()
    top = probability.argmax()
    expected = probability[top] * draws
    assert abs((tokens == top).sum() - expected) < 6 * expected.sqrt()


@pytest.mark.usefixtures("from_root")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_streaming_read_reads_all_of_odd_sizes(dtype: torch.dtype, threads: int) -> None:
    """All but the last of an odd number of halves: a word of NaN is found, or summed, anywhere."""
    from benchmarks.limits import streaming_read

    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (1, 2, 7, 1001):
            x = torch.randn(1, size).to(dtype)
            words = size // (4 // dtype.itemsize)
            found = streaming_read(x)()
            assert found is None or isinstance(found, torch.Tensor)
            for word in {0, words // 2, words - 1} if words else ():
                marked = x.clone()
                view = marked.view(-1)[: words * 4 // dtype.itemsize].view(torch.int32)
                view[word] = 0x7FC12345
                try:
                    found = streaming_read(marked)()
                except ValueError as error:
                    assert "has the word 0x7fc12345 in it" in str(error)
                else:
                    assert isinstance(found, torch.Tensor) and found.isnan()
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.usefixtures("from_root")
def test_goal_is_judged_on_its_worst_case() -> None:
    from benchmarks.goals import Goal, evaluate
    from benchmarks.harness import Case, Result

    def result(batch: int, ours: float, peer: float) -> Result:
        case = Case("op", "name", {"B": batch}, lambda with_peers: [])
        timings = {"lmdecode": timing.Timing((ours, 2 * ours)), "peer": timing.Timing((peer,))}
        return Result(case, 1, timings, {"lmdecode": True, "peer": True})

    results = [result(1, 1e-6, 9e-6), result(2, 2e-6, 8e-6)]
    goal = Goal("name", "warm", "peer", "at least", 5, lambda r: r.ratio("peer"))
    (outcome,) = evaluate([goal], results)
    assert outcome.worst == pytest.approx(4)
    assert outcome.best == pytest.approx(9)
    assert outcome.where is results[1]
    assert outcome.met is False
    (missing,) = evaluate([Goal("name", "cold", "peer", "at least", 5, lambda r: 1.0)], results)
    assert missing.met is None


@pytest.mark.usefixtures("from_root")
@pytest.mark.parametrize("level", ["default", "avx2", "avx512", "amx"])
def test_a_goal_of_tiles_is_for_processors_that_have_them(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.goals import Goal, evaluate

    monkeypatch.setattr(lmdecode, "cpu_capability", lambda: level)
    goals = [
        Goal("name", "warm", peer, "at least", 5, lambda r: 1.0, with_tiles=with_tiles)
        for peer, with_tiles in (("any", None), ("with", True), ("without", False))
    ]
    judged = [outcome.goal.peer for outcome in evaluate(goals, [])]
    assert judged == ["any", "with" if level == "amx" else "without"]


@pytest.mark.usefixtures("from_root")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are x86's")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_the_peak_of_tiles_is_compiled_for_processors_that_have_them(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.attention import peak

    flags = Path("/proc/cpuinfo").read_text()
    if " amx_tile " in flags and lmdecode.cpu_capability() == "amx":
        peak.multiply_add(1e6, dtype)()
        return
    monkeypatch.setattr(lmdecode, "cpu_capability", lambda: "amx")
    if " amx_tile " not in flags:
        assert peak.multiply_add(1e6, dtype) is None  # tiles are emulated
        monkeypatch.setattr(Path, "read_text", lambda path: f"flags: amx_tile {flags}")
        monkeypatch.setattr(peak, "_tiles_are_permitted", lambda: True)
    assert peak.multiply_add(1e6, dtype) is not None


# The steps before and after a sample, and the state that they tell; the next sample has the next.
_STEPS_AND_STATES = (
    (30.0, 44.9, "quick"), (70.1, 120.0, "slow"), (30.0, 120.0, "mixed"), (45.0, 30.0, "mixed"),
    (90.0, 70.0, "mixed"),
)  # fmt: skip
_NANOSECONDS = {"quick": 3_000_000, "slow": 9_000_000, "mixed": 5_000_000}


class _CoreOfBothStates:
    """A core that changes its state from sample to sample; a call takes a time of its state."""

    def __init__(self) -> None:
        self.time = self.asked = 0

    def probe(self) -> float:
        self.asked += 1
        sample, is_after = divmod(self.asked - 1, 2)
        steps = _STEPS_AND_STATES[sample % len(_STEPS_AND_STATES)]
        return steps[1] if is_after else steps[0]

    def call(self) -> None:
        _, _, state = _STEPS_AND_STATES[self.asked // 2 % len(_STEPS_AND_STATES)]
        self.time += _NANOSECONDS[state]


@pytest.mark.usefixtures("from_root")
def test_samples_of_a_quick_and_of_a_slow_core_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import core_state, harness, report

    core = _CoreOfBothStates()
    monkeypatch.setitem(timing._CLOCKS, "thread", lambda: core.time)
    monkeypatch.setattr(core_state, "probe", lambda: core.probe)
    contestants = [
        harness.Contestant(harness.OURS, core.call),
        harness.Contestant("peer", core.call),
    ]
    case, plain = (
        harness.Case("group", name, {}, lambda with_peers: contestants, has_tiles=has_tiles)
        for name, has_tiles in (("tiles", True), ("plain", False))
    )
    effort = harness.Effort(seconds=0.01, rounds=10, min_calls=10)
    result = harness.run_case(case, effort, 1)
    for found in result.timings.values():
        assert len(found.samples) == len(found.states) == 10
        assert set(found.states) == {"quick", "slow", "mixed"}
        for seconds, state in zip(found.samples, found.states, strict=True):
            assert seconds == pytest.approx(_NANOSECONDS[state] * 1e-9), state

    few = timing.Timing((0.002, 0.004, 0.008, 0.009), ("quick", "quick", "slow", "mixed"))
    result.timings = {harness.OURS: few, "peer": timing.Timing((0.001,), ("mixed",))}
    head, _, row = report.results_table([result]).splitlines()
    cells = dict(zip(head.split("|"), row.split("|"), strict=True))
    cells = {name.strip(): cell.strip() for name, cell in cells.items()}
    assert cells["lmdecode, quick core us (calls)"] == "3000 (2)"
    assert cells["lmdecode, slow core us (calls)"] == "8000 (1)"
    assert cells["peer, quick core us (calls)"] == cells["peer, slow core us (calls)"] == "-"
    times: Any = result.as_json()["times"]
    assert times[harness.OURS]["quick_us"] == pytest.approx([2000.0, 4000.0])

    asked = core.asked
    for other, threads in ((plain, 1), (case, 2)):  # other threads are on other cores
        result = harness.run_case(other, effort, threads)
        assert all(not found.states for found in result.timings.values())
        assert "core" not in report.results_table([result])
        assert "quick" not in json.dumps(result.as_json())
    assert core.asked == asked


@pytest.mark.usefixtures("from_root")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="tiles are x86's")
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a compiler")
def test_the_probe_of_a_core_runs_where_there_are_tiles_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks import core_state
    from benchmarks.attention import peak

    if lmdecode.cpu_capability() == "amx" and peak.has_tiles():
        assert 5.0 < core_state.probe()() < 1000.0
        return
    assert core_state.probe() is None
    monkeypatch.setattr(lmdecode, "cpu_capability", lambda: "amx")
    if not peak.has_tiles():
        assert core_state.probe() is None  # tiles are emulated
    monkeypatch.setattr(core_state, "has_tiles", lambda: True)
    assert core_state.probe() is not None  # it is compiled, and not called


@pytest.mark.usefixtures("from_root")
@pytest.mark.parametrize("level", ["default", "avx2", "avx512"])
def test_a_core_is_not_asked_at_other_levels(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import core_state

    def not_asked() -> bool:
        raise AssertionError("the level has no tiles")

    monkeypatch.setattr(lmdecode, "cpu_capability", lambda: level)
    monkeypatch.setattr(core_state, "has_tiles", not_asked)
    assert core_state.probe() is None


@pytest.mark.usefixtures("from_root")
def test_each_goal_speaks_of_a_case() -> None:
    from benchmarks.discovery import discover
    from benchmarks.harness import Result

    for benchmark in discover():
        code = importlib.import_module(f"benchmarks.{benchmark.name}")
        results = [Result(case, 1, {}, {}) for case in benchmark.cases(False)]
        for goal in getattr(code, "GOALS", ()):
            of_goal = [
                r for r in results if (r.case.name, r.case.caches) == (goal.name, goal.caches)
            ]
            assert any(all(c(r) for c in goal.conditions) for r in of_goal), (benchmark.name, goal)


@pytest.mark.usefixtures("from_root")
def test_products_of_a_prompt() -> None:
    """Counted matrix by matrix, for each token that its result is needed of."""
    from benchmarks.decoder.whole_model import models

    c = models.MODELS["tiny"]
    size, keys = c["hidden_size"], c["num_key_value_heads"] * 64
    before, behind = size * size + 2 * size * keys, size * size + 3 * size * c["intermediate_size"]
    head = size * c["vocab_size"]
    for tokens in (1, 24):
        one_layer = tokens * (before + behind)
        expected = one_layer + tokens * before + behind + head
        assert models.products_of_prompt("tiny", tokens) == expected
    assert models.products_of_prompt("tiny", 1) == models.linear_weights("tiny")


@pytest.mark.usefixtures("from_root")
def test_the_slowest_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import limits

    def short() -> float:
        return 1.0

    def long() -> float:
        return 2.0

    monkeypatch.setattr(limits, "_seconds", lambda call: call())
    assert limits.slowest([short, long]) is long
    assert limits.slowest([long, short]) is long
    assert limits.slowest([short, None]) is None


@pytest.mark.usefixtures("from_root")
def test_parts_of_a_prompt_by_the_names_of_functions() -> None:
    from benchmarks.prompt_profile import parts_of

    report = """
# Overhead;Shared Object;Symbol
 40.00%  ;_C.so           ;[.] void lmdecode::avx512_amx::linear::multiply_many_rows<...>
 20.00%  ;_C.so           ;[.] lmdecode::avx512_bf16::linear::add_chain<BFloat16Pairs, 6, 0>
  8.00%  ;_C.so           ;[.] lmdecode::avx512_vnni::linear::multiply_panels<Int8Quads>
  7.00%  ;_C.so           ;[.] lmdecode::avx512_vnni::linear::finish_vectors<...>
  6.00%  ;_C.so           ;[.] lmdecode::avx512_bf16::attention::TileAttention<...>::run_strip
  5.00%  ;_C.so           ;[.] lmdecode::avx512_vnni::linear::(anonymous namespace)::prepare
  4.00%  ;_C.so           ;[.] lmdecode::avx512::linear::rms_norm_rows
  3.00%  ;_C.so           ;[.] lmdecode::linear::read_packed_row
  0.50%  ;[kernel.kallsyms];[k] finish_task_switch.isra.0
"""
    parts, named = parts_of(report.splitlines())
    assert parts == {
        "attention": 6.0, "products": 60.0, "their ends": 15.0, "rounding of rows": 5.0,
        "norms": 4.0, "rest": 3.5,
    }  # fmt: skip
    assert named == ["lmdecode::linear::read_packed_row 3.0 %"]
    with pytest.raises(ValueError, match=r"functions of _C\.so have no names; expected"):
        parts_of(["  9.00%  ;_C.so  ;[.] 0x00000000007d6898"])


def test_interleaved_spreads_slow_contestants_over_the_rounds() -> None:
    calls: list[str] = []

    def work(name: str, size: int):
        data = torch.ones(size)
        return lambda: (calls.append(name), data.sum())

    timings = timing.interleaved(
        {"fast": work("fast", 10), "slow": work("slow", 40_000_000)}, seconds=0.2, rounds=12,
        min_calls=2,
    )  # fmt: skip
    assert len(timings["slow"].samples) >= 2
    assert len(timings["fast"].samples) > len(timings["slow"].samples)
    assert timings["fast"].minimum <= timings["fast"].median
    last = len(calls) - 1 - calls[::-1].index("slow")
    assert "fast" in calls[:last]
    assert "fast" in calls[last:]


def test_interleaved_evicts_then_rewarms_then_calls() -> None:
    order: list[str] = []

    class Evictor(timing.CacheEvictor):
        def __call__(self) -> None:
            order.append("evict")

    timing.interleaved(
        {"a": lambda: order.append("call")}, rounds=3, evictor=Evictor(8),
        rewarm={"a": lambda: order.append("rewarm")},
    )  # fmt: skip
    assert order[-3:] == ["evict", "rewarm", "call"]


def test_interleaved_sets_threads_and_restores_them() -> None:
    before = torch.get_num_threads()
    seen: dict[str, set[int]] = {"one": set(), "default": set()}
    shares: list[float] = []
    timing.interleaved(
        {name: lambda name=name: seen[name].add(torch.get_num_threads()) for name in seen},
        seconds=0.01,
        rounds=3,
        clock="wall",
        threads={"one": 1},
        on_turn=shares.append,
    )
    assert seen == {"one": {1}, "default": {before}}
    assert torch.get_num_threads() == before
    assert sum(shares) == pytest.approx(1, rel=0.3)


def test_a_file_keeps_what_the_run_does_not_have(tmp_path: Path) -> None:
    from benchmarks import report

    file = tmp_path / "results.md"
    file.write_text(f"before\n{report.START}\n{report.END}\nafter\n")
    report.write(file, {"b": "old b", "C": "c\n\n| ### |"})
    report.write(file, {"a": "a", "b": "new b"})
    between = "### a\n\na\n\n### b\n\nnew b\n\n### C\n\nc\n\n| ### |\n"
    assert file.read_text() == f"before\n{report.START}\n\n{between}\n{report.END}\nafter\n"
    report.write(tmp_path / "other.md", {"a": "a"})
    assert (tmp_path / "other.md").read_text() == "### a\n\na\n"


def test_interleaved_takes_the_seconds_that_calls_return() -> None:
    seconds = iter([9.0, 3.0, 2.0])
    timings = timing.interleaved(
        {"a": lambda: next(seconds)}, rounds=2, min_calls=2, seconds=0.0, clock="returned"
    )
    assert timings["a"].samples == (3.0, 2.0)


def test_interleaved_names_an_unknown_clock() -> None:
    expected = "clock is 'sun'; expected one of thread, process, wall, returned"
    with pytest.raises(ValueError, match=expected):
        timing.interleaved({}, clock="sun")


def build_allocation(before: int, during: int) -> Callable[[], None]:
    """Take and free ``before`` bytes; return a call that does so with ``during`` bytes."""

    def call(size: int = during) -> None:
        torch.ones(size, dtype=torch.uint8)

    call(before)
    return call


@pytest.mark.slow
def test_peak_memory_is_that_of_the_call_alone() -> None:
    ours = torch.ones(200 << 20, dtype=torch.uint8)  # nor that of this process
    for before, during in ((300 << 20, 50 << 20), (1, 100 << 20)):
        measured = peak_memory(build_allocation, before, during)
        assert 0.9 * during < measured < during + (20 << 20)
    assert len(ours) == 200 << 20
    assert 0.9 * during < peak_without_files(build_allocation, 1, during)
    with pytest.raises(RuntimeError, match="negative dimension"):
        peak_memory(build_allocation, -1, 1)


def build_reading(path: Path) -> Callable[[], None]:
    """Return a call that maps a file, and reads all of it."""

    def call() -> None:
        int(torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8).max())

    return call


@pytest.mark.slow
def test_peak_memory_without_files(tmp_path: Path) -> None:
    path, size = tmp_path / "file", 100 << 20
    with path.open("wb") as file:
        file.truncate(size)
    assert peak_memory(build_reading, path) > 0.9 * size
    assert peak_without_files(build_reading, path) < 0.1 * size


def _repository(root: Path, *versions: str) -> list[str]:
    """Commit these texts of a kernel's header one after the other, as a tree with results."""

    def git(*arguments: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.check_output(["git", "-C", root, *who, *arguments], text=True).strip()

    git("init", "-q")
    (root / "csrc" / "area").mkdir(parents=True)
    (root / "csrc" / "area" / "op_cpu.cpp").write_text('#include "area/op.h"\n')
    (root / "csrc" / "area" / "op_cuda.cpp").write_text('#include "area/other.h"\n')
    commits = []
    for number, text in enumerate(versions):
        (root / "csrc" / "area" / "op.h").write_text(text)
        (root / "csrc" / "area" / "other.h").write_text(f"int a{number};\n")
        git("add", "-A")
        git("commit", "-q", "-m", f"version {number}")
        commits.append(git("rev-parse", "--short=12", "HEAD"))
    return commits


@pytest.mark.usefixtures("from_root")
@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_results_older_than_their_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.stale import print_stale

    here = "AMD EPYC (family 25, model 1)"
    assert print_stale(tmp_path, {}, here, "avx2") == 2
    assert "has no history of" in capsys.readouterr().err
    changed = 'int a = 1;  // one\nauto b = "//1";\n'
    first, second, third, _ = _repository(
        tmp_path, "int a;\n", 'int a = 1;\nauto b = "//2";\n', changed.replace("2", "1"),
        "// More.\n\n" + changed.replace("one", "two"),
    )  # fmt: skip
    pages = tmp_path / "benchmarks" / "results"
    pages.mkdir(parents=True)
    (pages / "other.md").write_text("On 2026-01-02.\n")

    def told(
        commit: str, group: str = "op", cpu: str = here, page: str = "cpu.md", level: str = "avx2"
    ) -> tuple[int, list[str]]:
        (pages / page).write_text(
            f"### {group}\n\nCPU {cpu}, 2 cores, kernels: {level}; date 2026-01-03; threads 1; "
            f"commit {commit}; torch 2.\n\nGoals:\n\n|g|\n|-|\n|1|\n\nCases:\n\n|c|\n|-|\n|1|\n"
        )
        status = print_stale(tmp_path, {"op": ("area/op",)}, here, "avx2")
        (pages / page).unlink()
        lines = capsys.readouterr().out.splitlines()
        assert "other.md: no commit; 2026-01-02" in lines
        assert lines[-1] == f"{status} of 1 sections with a commit are stale"
        return status, [line for line in lines if line.startswith(page)]

    assert told(third) == (0, [])  # comments alone, and headers of CUDA
    for commit, count in ((first, 2), (second, 1)):  # in a string two slashes are no comment
        status, (line,) = told(commit)
        assert status == 1
        assert line.startswith(f"cpu.md, op: 1 rows, commit {commit} of 20")
        assert f"{here}: commits since: {count}, the last {third[:7]}" in line
        assert line.endswith('"version 2"')
    status, (line,) = told(first, cpu="AMD EPYC (family 26, model 2)")
    assert status == 1
    assert "model 2), not this machine: commits since: 2" in line
    status, (line,) = told(first, level="avx512")  # that this machine hides
    assert status == 1
    assert "model 1) with avx512, not this machine: commits since: 2" in line
    status, (line,) = told("0123456789ab")
    assert status == 0
    assert line.endswith("of 2026-01-03, " + here + ": unknown, git does not have the commit")
    status, (line,) = told(first, group="gone")
    assert status == 0
    assert line.endswith("no benchmark measures this group")
    # Models in a page of quality pass through other areas than this one.
    assert told(first, group="a model", page="quality_avx2.md") == (0, [])


@pytest.mark.usefixtures("from_root")
def test_each_benchmark_names_kernels_that_are_there() -> None:
    from benchmarks.discovery import discover
    from benchmarks.stale import kernel_files

    for benchmark in discover():
        for begin in benchmark.sources:
            assert kernel_files(_ROOT, [begin]), (benchmark.name, begin)
