"""Who may include and import whom: the rules of docs/architecture.md, read from the sources."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "lmdecode"
MAX_LINES = 800

# Each folder of csrc and the folders that it may include.
BASE = {"common"}
KERNELS = {"simd", *BASE}
ALLOWED = {
    "common": set(),
    "simd": BASE,
    "sampling": KERNELS,
    "kv_cache": KERNELS,
    "linear": KERNELS,
    "beam": {"sampling", *KERNELS},
    "attention": {"kv_cache", *KERNELS},
    "decoder": {"sampling", "beam", "kv_cache", "attention", "linear", *KERNELS},
    "store": BASE,
    "bindings": {
        "decoder", "sampling", "beam", "kv_cache", "attention", "linear", "store", *KERNELS,
    },
}  # fmt: skip
TORCH = ("torch/", "ATen/", "c10/", "caffe2/", "pybind11/")
TORCH_HEADER_ONLY = "ATen/cpu/vec/"  # kernel files may use it
TORCH_ADAPTERS = {CSRC / "common" / "parallel.h"}
# Templates of these, instantiated in a file compiled for AVX-512, may be linked for everybody.
STD_IN_KERNELS = {
    "algorithm", "array", "deque", "exception", "fstream", "functional", "iostream", "list", "map",
    "memory", "mutex", "numeric", "optional", "ostream", "queue", "set", "span", "sstream",
    "stdexcept", "string", "string_view", "thread", "tuple", "unordered_map", "unordered_set",
    "utility", "variant", "vector",
}  # fmt: skip

# What may be used of std: types and constants, no code.
STD_CODE = re.compile(
    r"std::(?!is_|conditional|remove_|enable_if|integral_constant|bool_constant|numeric_limits|"
    r"size_t|u?int)"
)

INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*[<\"]([^>\"]+)[>\"]", re.MULTILINE)
CPP_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}


def cpp_files() -> list[Path]:
    return sorted(path for path in CSRC.rglob("*") if path.suffix in CPP_SUFFIXES)


def includes(path: Path) -> list[str]:
    return INCLUDE.findall(path.read_text())


def own_header(path: Path, include: str) -> Path | None:
    """Return the header of csrc that an include names."""
    for folder in (CSRC, path.parent):
        if (folder / include).is_file():
            return (folder / include).resolve()
    return None


def kernel_files() -> list[Path]:
    """Files compiled once for each CPU capability, and all of csrc that they include."""
    found = {path for path in cpp_files() if path.name.endswith("_kernel.cpp")}
    new = set(found)
    while new:
        headers = {own_header(path, include) for path in new for include in includes(path)}
        new = {header for header in headers if header is not None} - found
        found |= new
    return sorted(found)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_there_is_something_to_check() -> None:
    assert len(cpp_files()) > 20
    assert len(kernel_files()) > 5
    assert {path.parent.name for path in cpp_files()} >= {
        "common", "simd", "sampling", "beam", "bindings",
    }  # fmt: skip


@pytest.mark.parametrize("path", cpp_files(), ids=name)
def test_includes(path: Path) -> None:
    folder = path.relative_to(CSRC).parts[0]
    assert folder in ALLOWED, f"csrc/{folder} has no place in the order of the folders"
    for include in includes(path):
        if include.startswith(TORCH):
            in_kernel = include.startswith(TORCH_HEADER_ONLY) and path in kernel_files()
            assert folder == "bindings" or path in TORCH_ADAPTERS or in_kernel, include
            continue
        header = own_header(path, include)
        if header is None:
            assert "/" not in include or include.startswith(("sys/", "cuda")), (
                f"{include} not found"
            )
            continue
        target = header.relative_to(CSRC).parts[0]
        assert target == folder or target in ALLOWED[folder], f"{folder} includes {include}"


def device_headers() -> list[Path]:
    return [path for path in cpp_files() if path.suffix == ".cuh"]


@pytest.mark.parametrize("path", sorted({*kernel_files(), *device_headers()}), ids=name)
def test_kernel_files_include_no_std_templates(path: Path) -> None:
    found = STD_IN_KERNELS & set(includes(path))
    assert not found, f"<{'>, <'.join(sorted(found))}>"


@pytest.mark.parametrize("path", kernel_files(), ids=name)
def test_kernel_files_use_no_std_code_and_throw_nothing(path: Path) -> None:
    code = re.sub(r"//[^\n]*", "", path.read_text())
    assert not re.search(r"\bthrow\b", code)
    assert not STD_CODE.findall(code)


# --- Python ---------------------------------------------------------------------------------------


def python_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file imports, at the top or within a function, by absolute name."""
    package = ["lmdecode", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_in(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


OUTER = ("integrations", "compat", "demo")  # built on the core


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_imports(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    modules = set(imported_modules(path))
    if part not in OUTER:
        outer = {module for module in modules if is_in(module, *(f"lmdecode.{o}" for o in OUTER))}
        if part == "decoder":  # Decoding.from_pretrained and generate, when they are called
            outer = {m for m in outer if not is_in(m, "lmdecode.integrations.transformers")}
        assert not outer, f"{part} imports {outer}"
        # The store's second tier imports redis-py, where one is asked for.
        extras = {"transformers"} if part == "store" else {"transformers", "redis"}
        third_party = {module.split(".")[0] for module in modules} & extras
        assert not third_party, f"{part} imports {third_party}"
    if part == "reference":
        compiled = {
            module
            for module in modules
            if is_in(
                module,
                "lmdecode._library",
                "lmdecode._fakes",
                "lmdecode._C",
                "lmdecode.attention",
                "lmdecode.beam",
                "lmdecode.beam_scorer",
                "lmdecode.beam_search",
                "lmdecode.constrained_beam_scorer",
                "lmdecode.kv_cache",
                "lmdecode.kv_cache_blocks",
                "lmdecode.kv_cache_indirection",
                "lmdecode.linear",
                "lmdecode.sampling",
            )
        }
        assert not compiled, f"the reference imports {compiled}"
        assert "lmdecode" not in modules, (
            "the reference imports the compiled library by the package"
        )
        assert "torch.ops" not in path.read_text()


def test_no_circle_of_imports_in_the_store() -> None:
    """Not within functions either, nor for types alone."""
    files = {f"lmdecode.store.{path.stem}": path for path in (PACKAGE / "store").glob("*.py")}
    imports = {module: set(imported_modules(path)) & set(files) for module, path in files.items()}
    assert sum(map(len, imports.values())) > 20
    while imports:
        leaves = {module for module, others in imports.items() if not others & set(imports)}
        assert leaves, f"a circle among {sorted(imports)}"
        imports = {module: others for module, others in imports.items() if module not in leaves}


@pytest.mark.parametrize("path", cpp_files() + python_files(), ids=name)
def test_no_file_is_too_long(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{lines} lines; expected at most {MAX_LINES}"
