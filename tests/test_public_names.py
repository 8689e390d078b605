"""The public names of lmdecode: none is renamed or lost, and modules load when they are named."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lmdecode

ROOT = Path(__file__).resolve().parents[1]
# Those of the pages on the API, and some of lmdecode.store's.
OF_THE_STORE = ("Fingerprint", "Hit", "KVStore", "Session", "StoreError")
NAMES = {
    *OF_THE_STORE,
    *(
        name
        for page in ROOT.glob("docs/api/*.md")
        for name in re.findall(r"^::: lmdecode\.(\w+)$", page.read_text(), re.MULTILINE)
    ),
}


def test_public_names() -> None:
    assert sorted(lmdecode.__all__) == sorted(NAMES)
    assert NAMES <= set(dir(lmdecode))
    for name in NAMES:
        assert getattr(lmdecode, name) is not None
    assert not hasattr(lmdecode, "Sampler0")


def test_dir_shows_what_is_public_and_nothing_else() -> None:
    folders = {init.parent.name for init in ROOT.glob("python/lmdecode/*/__init__.py")}
    areas = folders - {"cli", "demo"}  # those are commands
    assert dir(lmdecode) == sorted({"__version__", *areas, *NAMES})
    for area in areas:
        assert getattr(lmdecode, area).__name__ == f"lmdecode.{area}"


def test_exceptions_have_one_base_and_stay_what_they_were() -> None:
    store = importlib.import_module("lmdecode.store")
    serving = importlib.import_module("lmdecode.serving.errors")
    for error in (lmdecode.OutOfBlocksError, store.StoreError, store.StoreLockedError):
        assert issubclass(error, lmdecode.Error) and issubclass(error, RuntimeError)
    for error in (store.FingerprintMismatchError, serving.BadRequest):
        assert issubclass(error, lmdecode.Error) and issubclass(error, ValueError)


def test_decoding_has_a_name_in_its_area() -> None:
    area = importlib.import_module("lmdecode.decoder")
    assert area.Decoding is lmdecode.Decoding
    assert "Decoding" in area.__all__


def test_the_store_is_lmdecode_stores() -> None:
    store = importlib.import_module("lmdecode.store")
    for name in OF_THE_STORE:
        assert getattr(lmdecode, name) is getattr(store, name)


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, from a folder that holds nothing else."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_lmdecode_does_not_need_the_store(tmp_path: Path) -> None:
    code = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("lmdecode.store"):
            raise ImportError("the store's own error")

sys.meta_path.insert(0, Hidden())
import lmdecode
assert not any(name.startswith("lmdecode.store") for name in sys.modules)
assert {"KVStore", "Session"} <= set(dir(lmdecode)) & set(lmdecode.__all__)
for name in ("KVStore", "Session"):
    try:
        getattr(lmdecode, name)
    except ImportError as error:
        print(error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the store's own error"] * 2


HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Hidden())
{code}
"""
CALLS = [
    ("transformers", "transformers", "import lmdecode.integrations.transformers"),
    ("transformers", "transformers",
     "import lmdecode; lmdecode.Decoding.from_pretrained('a-folder')"),
    ("redis", "redis",
     "from lmdecode.store import Remote; Remote(url='redis://localhost').connector()"),
    ("matplotlib", "demo-all", "from lmdecode.demo.harness import pyplot; pyplot()"),
]  # fmt: skip


@pytest.mark.parametrize(("package", "extra", "code"), CALLS, ids=lambda value: value[:60])
@pytest.mark.slow
def test_what_is_missing_names_its_extra(
    package: str, extra: str, code: str, tmp_path: Path
) -> None:
    """In words that work with the source folder, too."""
    done = run(HIDE.format(package=package, code=code), tmp_path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert package in message
    assert f"pip install 'lmdecode[{extra}]'" in message
    assert f"in its source folder pip install '.[{extra}]'" in message


@pytest.mark.parametrize(
    "name",
    ["store.KVStore", "reference.swa_mask", "compat.ascend.top_k_top_p_sample",
     "compat.faster_transformer.decoding", "formats.gguf.load_tokenizer"],
)  # fmt: skip
@pytest.mark.slow
def test_modules_are_loaded_when_they_are_asked_for(name: str) -> None:
    module = "lmdecode." + name.rsplit(".", 1)[0]
    program = (
        f"import sys, lmdecode; assert {module!r} not in sys.modules; "
        f"print(lmdecode.{name}.__name__); "
        "assert not hasattr(lmdecode, 'stores') and not hasattr(lmdecode.compat, 'stores')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == name.rsplit(".", 1)[1]
