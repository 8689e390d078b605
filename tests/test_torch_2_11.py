"""All that includes torch compiles against the oldest torch's headers, of the small macOS wheel."""

import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.wheels import files_of_wheels

ROOT = Path(__file__).resolve().parent.parent
VERSION = "2.11.0"
WHEEL = ("--platform", "macosx_11_0_arm64", "--python-version", "3.11", f"torch=={VERSION}")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="in source checkouts only"),
]


@pytest.fixture(scope="session")
def include() -> Path:
    """Return the folder of the headers."""
    prefix = "torch/include/"
    return files_of_wheels(
        ROOT / "build" / f"torch-{VERSION}" / "include",
        f"the wheel of torch {VERSION}",
        lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None,
        *WHEEL,
    )


@pytest.fixture(scope="session")
def commands(include: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return source file to the command that the build compiles it with, with these headers."""
    for tool in ("cmake", "ninja"):
        if shutil.which(tool, path=search_path()) is None:
            pytest.skip(f"needs {tool}")
    torch = tmp_path_factory.mktemp("torch")
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    (torch / "include").symlink_to(include)
    (torch / "lib").symlink_to(Path(spec.origin).parent / "lib")
    build = torch / "build"
    configure = ["cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja"]
    cuda = "OFF" if shutil.which("nvcc") is None else "ON"
    configure += [f"-DLMDECODE_TORCH_DIR={torch}", f"-DLMDECODE_BUILD_CUDA={cuda}"]
    subprocess.run(
        [*configure, f"-DPython3_EXECUTABLE={sys.executable}"],
        check=True,
        capture_output=True,
        env={**os.environ, "PATH": search_path()},
    )
    found = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        words = shlex.split(entry["command"])
        if entry["file"].endswith(".cpp") and str(torch / "include") in words:
            while not Path(words[0]).name.startswith(("c++", "g++", "clang++")):
                words.pop(0)  # ccache
            output = words.index("-o")
            found[os.path.relpath(entry["file"], ROOT)] = [
                *words[:output], *words[output + 2 :], "-fsyntax-only",
            ]  # fmt: skip
    return found


def search_path() -> str:
    """Return where programs are: beside Python, then elsewhere."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def test_all_that_includes_torch_compiles(commands: dict[str, list[str]]) -> None:
    paths = {path for path in ROOT.glob("csrc/bindings/**/*.cpp") if "store" not in path.name}
    if shutil.which("nvcc") is None:
        paths = {path for path in paths if not path.name.endswith("_cuda.cpp")}
    bindings = {str(path.relative_to(ROOT)) for path in paths}
    assert bindings
    assert bindings <= set(commands)

    def compile_one(name: str) -> str:
        done = subprocess.run(commands[name], capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else f"{name}:\n{done.stderr}"

    with ThreadPoolExecutor(2) as pool:
        failures = [text for text in pool.map(compile_one, sorted(commands)) if text]
    assert not failures, "\n".join(failures)
