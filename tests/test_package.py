"""The sdist and the wheel: one is made of the other, and runs from anywhere without a compiler."""

import fcntl
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement

from tests.support.processes import run_python

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tests" / "support" / "installed_wheel.py"
MODEL = ROOT / "examples" / "kjv_mistral" / "model"
# What every system has on which torch's own wheels load: glibc 2.28 and the libraries of gcc 8.
NEWEST_SYMBOLS = {
    "GLIBC": (2, 28), "GLIBCXX": (3, 4, 25), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0),
}  # fmt: skip

OTHERS = ("aoti_torch_", "torch_", "Py", "_Py")
TELL = """
import ctypes, sys
calls = ctypes.CDLL(sys.argv[1]).PyInit_calls
calls.restype = ctypes.c_char_p
print(calls().decode(), end="")
"""

OP_CALL = """
import lmdecode, pathlib, sys, torch
assert pathlib.Path(lmdecode.__file__).is_relative_to(sys.argv[1]), lmdecode.__file__
logits = torch.tensor([[1.0, 3.0, 2.0]])
out = lmdecode.top_k_top_p_sample(logits, 2, greedy=True, return_logits=True)
print(out.index.tolist(), out.kept_logits.tolist())
"""


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run from a folder, with nothing of Python's or lmdecode's in the environment."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LMDECODE"))}
    return subprocess.run(
        command, cwd=cwd, env={**env, **environment}, capture_output=True, text=True, check=False
    )


def run_installed(target: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run Python with lmdecode from a folder; -S skips the import hook of an editable install."""
    paths = dict.fromkeys((str(target), *(sysconfig.get_path(p) for p in ("purelib", "platlib"))))
    return run(sys.executable, "-S", *arguments, cwd=cwd, PYTHONPATH=os.pathsep.join(paths))


@pytest.fixture(scope="session")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built of it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with (shared / "distributions.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sdist = build_sdist(shared / "sdist")
        return sdist, build_wheel(shared / "wheel", sdist)


@pytest.fixture(scope="session")
def sdist(distributions: tuple[Path, Path]) -> Path:
    return distributions[0]


@pytest.fixture(scope="session")
def wheel(distributions: tuple[Path, Path]) -> Path:
    return distributions[1]


def build_sdist(folder: Path) -> Path:
    if not folder.is_dir():
        code = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
        done = run(sys.executable, "-c", code, str(folder), cwd=ROOT)
        if "No module named" in done.stderr:
            pytest.skip(f"cannot build without an index: {done.stderr.splitlines()[-1]}")
        assert done.returncode == 0, done.stderr
    (sdist,) = folder.glob("lmdecode-*.tar.gz")
    return sdist


def build_wheel(folder: Path, sdist: Path) -> Path:
    """Build it with the packages that are installed, as ``make wheel`` does."""
    found = list(folder.glob("dist/lmdecode-*.whl"))
    if found:
        return found[0]
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.glob("lmdecode-*")
    command = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps")
    # But unoptimised, and for this processor: the tests of this file are of what the wheel holds
    # and of where it runs. ccache, where there is one, is to know the sources of the last run.
    defines = {
        "CMAKE_CXX_FLAGS_RELEASE": "-O0", "LMDECODE_BUILD_CUDA": "OFF", "LMDECODE_LEVELS": "native",
        "LMDECODE_PORTABLE": "ON",
    }  # fmt: skip
    settings = [f"--config-settings=cmake.define.{name}={defines[name]}" for name in defines]
    done = run(
        *command, "--no-index", *settings, ".", "-w", str(folder / "dist"), cwd=source,
        CCACHE_BASEDIR=str(source), CCACHE_NOHASHDIR="true",
    )  # fmt: skip
    lacks = re.search("BackendUnavailable|No module named.*|PORTABLE needs.*", done.stderr)
    if done.returncode != 0 and lacks:
        pytest.skip(f"cannot build a wheel here: {lacks[0]}")
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


def files_of(folder: Path) -> set[str]:
    """The sources in a folder, by their paths in it."""
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".so")
    }  # fmt: skip


@pytest.mark.slow
def test_sdist_holds_what_a_build_reads(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    top = {name.partition("/")[0] for name in names}
    assert top == {
        "CHANGELOG.md", "CMakeLists.txt", "LICENSE", "PKG-INFO", "README.md", "csrc",
        "pyproject.toml", "python",
    }  # fmt: skip
    for folder in ("csrc", "python/lmdecode"):
        inside = {name.removeprefix(f"{folder}/") for name in names if name.startswith(folder)}
        assert inside == files_of(ROOT / folder)


@pytest.mark.slow
def test_wheel_contents(wheel: Path) -> None:
    """The package, its libraries and the licences; no sources of C++, no tests."""
    names = [name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")]
    # The op libraries serve every CPython, the store's module one.
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert re.fullmatch(rf"lmdecode-[\d.]+-{python}-{python}-\w+\.whl", wheel.name)
    top = {name.split("/")[0] for name in names}
    assert {folder for folder in top if not folder.endswith(".dist-info")} == {"lmdecode"}
    inside = {name.removeprefix("lmdecode/") for name in names if name.startswith("lmdecode/")}
    libraries = {"_C.so", f"_store{sysconfig.get_config_var('EXT_SUFFIX')}"}
    assert inside == files_of(ROOT / "python" / "lmdecode") | libraries
    licenses = {Path(name).name for name in names if ".dist-info/licenses/" in name}
    assert licenses == {"LICENSE", "pybind11.txt", "pytorch.txt"}


def metadata(wheel: Path) -> dict[str, list[str]]:
    """What a wheel says of itself: field to values."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        head = archive.read(name).decode().split("\n\n")[0]
    fields: dict[str, list[str]] = {}
    for line in head.splitlines():
        field, _, value = line.partition(": ")
        fields.setdefault(field, []).append(value)
    return fields


@pytest.mark.slow
def test_metadata(wheel: Path) -> None:
    fields = metadata(wheel)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert {"Typing :: Typed", f"Programming Language :: Python :: {python}"} <= {
        *fields["Classifier"]
    }
    required = [line for line in fields["Requires-Dist"] if "extra ==" not in line]
    assert required == ["torch>=2.11"]


def symbols(library: Path, which: str) -> list[str]:
    nm = shutil.which("nm") or pytest.skip("needs nm")
    done = subprocess.run([nm, "-D", f"--{which}-only", library], capture_output=True, check=True)
    return done.stdout.decode().splitlines()


def check_glibc_2_28(library: Path) -> None:
    """It needs no symbol of a newer release, nor one of the standard library that torch has."""
    if platform.libc_ver()[1] > "2.36":
        pytest.skip("csrc/common/glibc_2_28.cpp does not know what newer headers need")
    lines = [line for line in symbols(library, "undefined") if line.split()[0] != "w"]
    found = [(line.split()[-1], re.search(r"@([A-Z]+)_([\d.]+)$", line)) for line in lines]
    versions = [
        (name, match[1], tuple(map(int, match[2].split(".")))) for name, match in found if match
    ]
    assert {system for _, system, _ in versions} == set(NEWEST_SYMBOLS)
    assert not [name for name, system, version in versions if version > NEWEST_SYMBOLS[system]]
    assert not [name for name, match in found if match is None and not name.startswith(OTHERS)]


@pytest.mark.slow
def test_libraries_need_no_more_than_glibc_2_28(installed: Path) -> None:
    for library in installed.glob("lmdecode/*.so"):
        check_glibc_2_28(library)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["-O0", "-O2"])
def test_what_older_systems_have_does_the_same(level: str, tmp_path: Path) -> None:
    """The definitions of csrc/common/glibc_2_28.cpp, against this system's own."""
    compiler = shutil.which(os.environ.get("CXX", "c++")) or pytest.skip("needs a C++ compiler")
    calls = ROOT / "tests" / "cpp" / "common" / "glibc_2_28_calls.cpp"
    told = []
    for name, sources in {
        "own": [calls], "older": [calls, ROOT / "csrc" / "common" / "glibc_2_28.cpp"],
    }.items():  # fmt: skip
        library = tmp_path / f"{name}.so"
        flags = ["-std=c++20", level, "-fvisibility=hidden", "-fPIC", "-shared", "-pthread"]
        shown = f"-Wl,--version-script={ROOT / 'csrc' / 'exports.map'}"
        subprocess.run([compiler, *flags, shown, *sources, "-o", library], check=True)
        done = run(sys.executable, "-c", TELL, str(library), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        told.append(done.stdout)
    assert told[0] == told[1]
    assert told[0].count("\n") == 8
    check_glibc_2_28(tmp_path / "older.so")


@pytest.mark.slow
def test_libraries_show_nothing_to_others(installed: Path) -> None:
    """SQLite is in the store's module, and another release of it may be in the process."""
    (store,) = installed.glob("lmdecode/_store*.so")
    assert b"SQLite format 3" in store.read_bytes()
    assert [line.split()[-1] for line in symbols(store, "defined")] == ["PyInit__store"]
    assert not symbols(installed / "lmdecode" / "_C.so", "defined")


def installed_for(requirement: Requirement) -> Iterator[importlib.metadata.Distribution]:
    """Yield the package of this environment that a requirement names, and all that it requires."""
    waiting, known = [requirement], set()
    while waiting:
        wanted = waiting.pop()
        extras = wanted.extras or {""}
        if (wanted.name, *sorted(extras)) not in known:
            known.add((wanted.name, *sorted(extras)))
            found = importlib.metadata.distribution(wanted.name)
            yield found
            for further in map(Requirement, found.requires or ()):
                marker = further.marker
                if marker is None or any(marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(further)


def environment(folder: Path, wheel: Path, extra: str) -> Path:
    """Return the programs of an environment with the wheel and extra, other packages linked."""
    done = run(sys.executable, "-m", "venv", "--without-pip", str(folder), cwd=folder.parent)
    assert done.returncode == 0, done.stderr
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    for requirement in map(Requirement, metadata(wheel)["Requires-Dist"]):
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for package in installed_for(requirement):
                for top in {file.parts[0] for file in package.files or ()} - {"..", "__pycache__"}:
                    if not (site / top).exists():
                        (site / top).symlink_to(Path(str(package.locate_file(top))).resolve())
    pip = (sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install")
    done = run(*pip, "--no-index", "--no-deps", str(wheel), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert not shutil.which("c++", path=str(folder / "bin"))
    return folder / "bin"


def run_bare(programs: Path, *command: str) -> str:
    """Run a program of an environment, and none of elsewhere."""
    done = run(str(programs / command[0]), *command[1:], cwd=programs, PATH=str(programs))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_runs_beside_torch_alone(wheel: Path, tmp_path: Path) -> None:
    """Sampling, a beam search, attention, the store, errors of C++."""
    out = run_bare(environment(tmp_path / "venv", wheel, ""), "python", str(SCRIPT))
    assert out.splitlines()[-1] == f"torch {torch.__version__}"


@pytest.mark.slow
def test_wheel_runs_a_model(wheel: Path, tmp_path: Path) -> None:
    options = ("--max-tokens", "8", "--temperature", "0")
    programs = environment(tmp_path / "venv", wheel, "serve")
    out = run_bare(programs, "lmdecode", "run", str(MODEL), "In the beginning", *options)
    assert out == " of the world, when the Son of\n"


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
