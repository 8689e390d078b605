"""The wheel: it builds from a copy of the sources, and runs from anywhere without them."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
import torch

from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("CMakeLists.txt", "LICENSE", "README.md", "csrc", "pyproject.toml", "python")

OP_CALL = """
import lmdecode, pathlib, sys, torch
assert pathlib.Path(lmdecode.__file__).is_relative_to(sys.argv[1]), lmdecode.__file__
out = lmdecode.top_k_top_p_sample(torch.tensor([[1.0, 3.0, 2.0]]), 2, return_logits=True)
print(out.index.tolist(), out.kept_logits.tolist())
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run from a folder, with nothing of Python's or lmdecode's in the environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LMDECODE"))}
    return subprocess.run(
        command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, check=False
    )


def run_installed(target: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with lmdecode from a folder, be it installed in this environment or not.

    -S skips the import hook of an editable install, which goes before PYTHONPATH.
    """
    paths = dict.fromkeys((str(target), *(sysconfig.get_path(p) for p in ("purelib", "platlib"))))
    return run(sys.executable, "-S", *arguments, cwd=cwd, PYTHONPATH=os.pathsep.join(paths))


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built once for all processes of xdist."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "wheel.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        found = list(shared.glob("wheel/dist/lmdecode-*.whl"))
        return found[0] if found else build_wheel(shared / "wheel")


def build_wheel(folder: Path) -> Path:
    """Build it from a copy of the sources with the packages that are installed."""
    source = folder / "source"
    source.mkdir(parents=True)
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(path, source / name, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    for module in ("pip", "scikit_build_core"):
        if run(sys.executable, "-c", f"import {module}", cwd=folder).returncode != 0:
            pytest.skip(f"cannot build without an index: {module} is not installed")
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    # Without CUDA kernels, which take minutes where there is an nvcc, and unoptimised: the tests of
    # this file are of what the wheel holds and of where it runs. ccache, where there is one, is to
    # know the sources of the last run.
    defines = {"LMDECODE_BUILD_CUDA": "OFF", "CMAKE_CXX_FLAGS_RELEASE": "-O0"}
    settings = [f"--config-settings=cmake.define.{name}={defines[name]}" for name in defines]
    done = run(
        *command, "--no-index", *settings, ".", "-w", str(folder / "dist"), cwd=source,
        CCACHE_BASEDIR=str(source), CCACHE_NOHASHDIR="true",
    )  # fmt: skip
    if done.returncode != 0 and re.search(r"BackendUnavailable|No module named", done.stderr):
        pytest.skip(f"cannot build without an index: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    (wheel,) = (folder / "dist").glob("lmdecode-*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target")
    done = run(*command, str(target), str(wheel), cwd=target)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.slow
def test_wheel_contents(wheel: Path) -> None:
    """The package, its libraries, its types and its licence; no sources of C++, no tests."""
    names = zipfile.ZipFile(wheel).namelist()
    # The op libraries serve every CPython, the store's module one.
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"lmdecode-[\d.]+-{python}-{python}-\w+\.whl", wheel.name)
    for name in ("__init__.py", "py.typed", "_C.so", "compat/ascend.py", "reference/sampling.py"):
        assert f"lmdecode/{name}" in names
    top = {name.split("/")[0] for name in names}
    assert {folder for folder in top if not folder.endswith(".dist-info")} == {"lmdecode"}
    assert any(re.search(r"\.dist-info/.*LICENSE", name) for name in names)
    suffixes = {Path(name).suffix for name in names if name.startswith("lmdecode/")}
    assert suffixes <= {".py", ".pyi", ".typed", ".so", ".html"}
    assert "lmdecode/serving/page.html" in names


@pytest.mark.slow
def test_report(installed: Path, tmp_path: Path) -> None:
    """``python -m lmdecode`` from an unrelated folder."""
    done = run_installed(installed, "-m", "lmdecode", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in done.stdout.splitlines())
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", lines["lmdecode"])
    assert lines["torch"] == torch.__version__
    assert lines["CPU capability"] in ("default", "avx2", "avx512", "amx")
    assert re.match(r"off: .+|kernels loaded, .+", lines["CUDA"])
    ops = lines["ops"].split(", ")
    assert {"cpu_capability", "top_k_top_p_sample", "top_k_top_p_sample.out"} <= set(ops)


@pytest.mark.slow
def test_op_call(installed: Path, tmp_path: Path) -> None:
    done = run_installed(installed, "-c", OP_CALL, str(installed), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[1] [[-inf, 3.0, 2.0]]"


@pytest.mark.slow
def test_the_version_is_one(wheel: Path, installed: Path, tmp_path: Path) -> None:
    code = "import lmdecode; print(lmdecode.__version__)"
    done = run_installed(installed, "-c", code, cwd=tmp_path)
    assert wheel.name.split("-")[1] == done.stdout.strip()


# --- The installed package ------------------------------------------------------------------------


def run_at(capability: str, code: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "LMDECODE_CPU_CAPABILITY": capability}
    return run_python("-c", code, cwd=cwd, env=env)


@pytest.mark.parametrize("capability", ["default", "avx2", "avx512"])
@pytest.mark.slow
def test_capability_can_be_forced(capability: str, tmp_path: Path) -> None:
    code = "import lmdecode; print(lmdecode.cpu_capability())"
    done = run_at(capability, code, tmp_path)
    levels = ["default", "avx2", "avx512"]
    best = {"AVX2": "avx2", "AVX512": "avx512"}.get(torch.backends.cpu.get_cpu_capability())
    if levels.index(capability) <= levels.index(best or "default"):
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == capability
    else:  # the machine lacks it
        assert done.returncode != 0
        assert "ValueError" in done.stderr and capability in done.stderr


WRONG_CAPABILITY = """
import contextlib, io, lmdecode, lmdecode.__main__, torch
for call in (
    lmdecode.cpu_capability,
    lambda: lmdecode.top_k_top_p_sample(torch.zeros(1, 4)),
):
    try:
        call()
    except ValueError as error:
        print("ValueError:", error)
with contextlib.redirect_stderr(io.StringIO()) as told:
    assert lmdecode.__main__.main([]) == 1
print("ValueError:", told.getvalue())
"""


@pytest.mark.slow
def test_matrix_units_are_used_where_they_are_and_demanded_elsewhere(tmp_path: Path) -> None:
    code = "import lmdecode; print(lmdecode.cpu_capability())"
    free, forced = run_at("", code, tmp_path), run_at("amx", code, tmp_path)
    if free.stdout.strip() == "amx":
        assert forced.stdout.strip() == "amx"
        return
    assert forced.returncode != 0
    assert "LMDECODE_CPU_CAPABILITY is amx, but this machine has at most" in forced.stderr


@pytest.mark.parametrize("word", ["bogus", "AVX2", " avx2"])
@pytest.mark.slow
def test_a_capability_that_does_not_exist(word: str, tmp_path: Path) -> None:
    """Importing works, every use raises."""
    done = run_at(word, WRONG_CAPABILITY, tmp_path)
    assert done.returncode == 0, done.stderr
    messages = [line for line in done.stdout.splitlines() if line.startswith("ValueError: ")]
    assert len(messages) == 3, done.stdout
    for message in messages:
        for text in ("LMDECODE_CPU_CAPABILITY", word, "default", "avx2", "avx512", "amx"):
            assert text in message


def test_an_empty_capability_is_none(tmp_path: Path) -> None:
    code = "import lmdecode; print(lmdecode.cpu_capability())"
    done = run_at("", code, tmp_path)
    assert done.returncode == 0, done.stderr
