"""What ``make gpu`` runs: the report of its stages, and the whole plan with the CPU standing in."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.skipif(
    not (_ROOT / "benchmarks").is_dir(), reason="benchmarks are in source checkouts only"
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return ``run(*stages, seconds=60)``: whether all passed, and the report."""
    monkeypatch.syspath_prepend(str(_ROOT))
    from benchmarks.gpu.report import Stage, run_stages

    def run(*stages: dict, seconds: float = 60) -> tuple[bool, str]:
        report = tmp_path / "gpu.md"
        made = [
            Stage(
                name=f"stage{number}",
                title=f"Stage {number}",
                command=[sys.executable, "-c", stage["code"].replace("REPORT", str(report))],
                seconds=stage.get("seconds", 30),
                required=stage.get("required", False),
            )
            for number, stage in enumerate(stages)
        ]
        return run_stages("Title", made, report, tmp_path / "logs", seconds), report.read_text()

    return run


PRINT = "print('| a figure |', flush=True); "


def test_a_crash_leaves_what_was_measured_and_the_stages_after_it(run) -> None:
    crash = PRINT + "import os, sys; print('the reason', file=sys.stderr, flush=True); os.abort()"
    passed, report = run({"code": crash}, {"code": "print('| another |')"})
    assert not passed
    assert "- Stage 0: FAILED: ended by SIGABRT" in report
    assert "- Stage 1: passed" in report
    assert "| a figure |" in report
    assert "| another |" in report
    assert "the reason" in report


def test_a_stage_that_is_left_out_has_not_passed_nor_failed(run) -> None:
    left_out = "print('Not run: no ncu.'); import sys; sys.exit(3)"
    passed, report = run({"code": left_out, "required": True}, {"code": PRINT})
    assert passed
    assert "- Stage 0: left out" in report
    assert "Not run: no ncu." in report
    assert "- Stage 1: passed" in report


def test_the_report_is_there_while_later_stages_run(run) -> None:
    passed, report = run({"code": PRINT}, {"code": "print(open('REPORT').read())"})
    assert passed
    seen = report.partition("## Stage 1")[2]
    assert "- Stage 0: passed" in seen
    assert "- Stage 1: not run" in seen
    assert "| a figure |" in seen


@pytest.mark.slow
def test_a_stage_that_hangs_is_stopped_with_what_it_started(run, tmp_path: Path) -> None:
    child = tmp_path / "child"
    hang = (
        PRINT + "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)']); "
        f"open({str(child)!r}, 'w').write(str(p.pid)); time.sleep(300)"
    )
    passed, report = run({"code": hang, "seconds": 3}, {"code": PRINT})
    assert not passed
    assert "- Stage 0: STOPPED: its time was up" in report
    assert "- Stage 1: passed" in report
    assert not Path(f"/proc/{child.read_text()}/cmdline").exists() or (
        b"sleep" not in Path(f"/proc/{child.read_text()}/cmdline").read_bytes()
    )


def test_what_the_time_does_not_suffice_for_is_named(run) -> None:
    passed, report = run({"code": "import time; time.sleep(30)"}, {"code": PRINT}, seconds=1)
    assert not passed
    assert "- Stage 1: NOT RUN: the time was up" in report


def test_nothing_runs_after_a_required_stage_failed(run) -> None:
    passed, report = run({"code": "raise SystemExit(4)", "required": True}, {"code": PRINT})
    assert not passed
    assert "- Stage 1: NOT RUN: Stage 0: FAILED: status 4" in report
    assert "a figure" not in report


def plan(tmp_path: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], str]:
    """Run the program; return how it ended, and its report."""
    report = tmp_path / "gpu.md"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.gpu", *arguments),
            *("--output", str(report), "--logs", str(tmp_path / "logs"), "--seconds", "900"),
        ],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return done, report.read_text()


LOST = """
import os
import pytest
from benchmarks.gpu import pytest_device

pytest_device.is_lost = lambda: "LOST" in os.environ


@pytest.mark.parametrize("number", range(8))
def test_on_cpu(number: int) -> None:
    if number == 3:
        os.environ["LOST"] = "1"
    assert number != 3 and "LOST" not in os.environ
"""


@pytest.mark.slow
def test_a_lost_device_fails_one_test_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("xdist")
    monkeypatch.syspath_prepend(str(_ROOT))
    from benchmarks.gpu import tests
    from benchmarks.gpu.machine import Machine

    (tmp_path / "test_lost.py").write_text(LOST)
    monkeypatch.setattr(tests, "_batches", lambda machine, in_parallel: [[str(tmp_path)]])
    machine = Machine("cpu")
    lines = list(tests.run(machine))
    assert machine.found_fault
    failed = [line for line in lines if "FAILED" in line]
    assert failed and all("test_on_cpu[3]" in line for line in failed), lines
    assert "7 passed" in lines[-1]


NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","7","void a::k::decode_kernel<a::BFloat16, 128, (a::Kind)1>(a::P)","gpu__time_duration.sum","ns","1,234"
"0","7","void a::k::decode_kernel<a::BFloat16, 128, (a::Kind)1>(a::P)","launch__registers_per_thread","register/thread","136"
"1","7","a::merge_kernel(a::P, long)","gpu__time_duration.sum","ns","2000000"
"""  # noqa: E501


def test_what_ncu_says_becomes_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))
    from benchmarks.gpu.watched import _tables

    one, two = _tables(NCU)
    assert one == ["decode_kernel", "1.2", "-", "-", "-", "-", "-", "136.0"]
    assert two[:2] == ["merge_kernel", "2000.0"]
    assert list(_tables("==ERROR== ERR_NVGPUCTRPERM")) == []


@pytest.mark.parametrize("name", ["top_k_top_p_sample", "reorder_cache_"])
def test_the_smoke_notices_a_wrong_result(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))
    import lmdecode
    from benchmarks.gpu import smoke
    from benchmarks.gpu.machine import Machine

    right, calls = getattr(lmdecode, name), 0

    def sometimes_wrong(*arguments: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if name == "reorder_cache_":
            return right(*arguments) if calls % 2 else None
        drawn = right(*arguments, **options)
        return drawn._replace(index=drawn.index + calls % 2)

    monkeypatch.setattr(lmdecode, name, sometimes_wrong)
    machine = Machine("cpu")
    rows = list(smoke.run(machine))
    assert machine.found_fault
    assert {row.split()[1] for row in rows if "DIFFERS" in row} == {name}


@pytest.mark.slow
def test_the_whole_plan_with_the_cpu_standing_in(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    done, report = plan(tmp_path, "--device", "cpu")
    assert done.returncode == 0, report
    assert report.startswith("# A rehearsal on the CPU: no figure counts")
    from benchmarks.gpu.__main__ import STAGES

    watched = {"sanitizer", "profile"}  # by programs of CUDA's, which a rehearsal has not
    for name, title, _ in STAGES:
        assert f"- {title}: {'left out' if name in watched else 'passed'}" in report
        assert f"## {title}" in report
    assert "DIFFERS" not in report
    for op in (
        "reorder_cache_", "update_beam_indirection_", "beam_step", "beam_finalize",
        "log_softmax_top_k", "merge of",
        "top_k_top_p_sample 300 float16, no filter", "k 50, p 0.9", "CUDA graph",
        "2 x 1000 bfloat16",
    ):  # fmt: skip
        assert op in report, op


@pytest.mark.parametrize("name", ["ncu", "compute-sanitizer"])
def test_a_program_that_is_missing_leaves_its_stage_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.syspath_prepend(str(_ROOT))
    from benchmarks.gpu import watched
    from benchmarks.gpu.machine import Machine

    monkeypatch.setattr(watched, "_find", lambda program: None)
    machine = Machine("cpu")
    machine.is_rehearsal = False
    assert watched.program_for(machine, name, "smoke_small") == (
        None,
        f"Not run: {name} is not installed.",
    )
    assert machine.is_left_out
    assert not machine.found_fault


@pytest.mark.slow
def test_some_stages_alone_do_not_replace_the_report(tmp_path: Path) -> None:
    report = _ROOT / "benchmarks" / "results" / "gpu.md"
    before = report.read_text() if report.exists() else None
    command = [sys.executable, "-m", "benchmarks.gpu", "caches", "--logs", str(tmp_path)]
    subprocess.run(command, cwd=_ROOT, capture_output=True, check=False)
    assert (report.read_text() if report.exists() else None) == before
    assert "Times: caches" in (tmp_path / "gpu.md").read_text()


@pytest.mark.slow
def test_without_a_device_the_run_says_so_and_stops(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    done, report = plan(tmp_path)
    assert done.returncode == 1
    assert f"lmdecode: torch {torch.__version__} sees no CUDA device" in report
    assert "- Tests: NOT RUN: The device, and a first call: FAILED" in report


def test_make_gpu_without_nvcc_says_so() -> None:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    pytest.importorskip("scikit_build_core")
    done = subprocess.run(
        ["make", "gpu", f"PYTHON={sys.executable}", "NVCC=no-such-nvcc"],
        cwd=_ROOT,
        env={**os.environ, "MAKEFLAGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "lmdecode: make gpu needs nvcc" in done.stdout
