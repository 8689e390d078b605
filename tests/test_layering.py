"""Who may include and import whom, read from the sources: docs/internals/architecture.md."""

import ast
import builtins
import functools
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

import pytest

from lmdecode.generation_options import OPTIONS

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


# Each area of the package and the areas that it may import. An area is a file or a folder of the
# package, or a folder within one that stands above the rest of it.
OPS = {"_ops", "_checks", "_memory", "_upload", "generation_options"}
AREAS = {"sampling", "beam", "kv_cache", "attention", "linear"}
CORE = {*OPS, *AREAS, "beam/engine", "beam/scorers", "models", "decoder"}
PYTHON_ALLOWED: dict[str, set[str]] = {
    "_fakes": set(),
    "_checks": set(),
    "_memory": set(),
    "_upload": set(),
    "_tables": set(),
    "generation_options": set(),
    "_ops": {"_checks", "_fakes"},
    "system": OPS,
    "sampling": OPS,
    "kv_cache": OPS,
    "linear": OPS,
    "attention": {"kv_cache", *OPS},
    "beam": {"sampling", *OPS},
    "beam/scorers": {"beam", *OPS},
    "beam/engine": {*AREAS, *OPS},
    "eager": {"linear", "attention", *OPS},
    "models": {"linear", *OPS},
    "decoder": {*AREAS, "beam/engine", "models", *OPS},
    "quality": {"models", "decoder", *OPS},
    "store": OPS,
    # Types, states and rules that op and reference share; PYTHON_OPS are what it may not touch.
    "reference": {"sampling", "beam", "beam/scorers", "models", "decoder", "linear"},
    "compat": CORE,
    "causal_fingerprint": {"store", "system", *CORE},
    "readers": {"models", "linear", *OPS},
    "integrations/transformers": {"causal_fingerprint", "readers", "store", "system", *CORE},
    "formats": {"readers"},
    "decoding": {"causal_fingerprint", "readers", "integrations/transformers", *CORE},
    "speech": {"readers", "decoding", "integrations/transformers", *CORE},
    "serving": {
        "quality", "speech", "store", "system", "readers", "decoding", "integrations/transformers",
        *CORE,
    },
    "integrations": {
        "serving", "readers", "decoding", "integrations/transformers", "store", "system", *CORE,
    },
    "cli": {
        "", "_tables", "quality", "speech", "serving", "store", "system", "readers", "decoding",
        *CORE,
    },
    "demo": {
        "", "_tables", "cli", "serving", "store", "system", "integrations/transformers", *CORE,
    },
    "__main__": {"", "cli", "demo"},
}  # fmt: skip
# A folder's __init__ is its shop window: it may show what stands above it in the same folder.
WINDOWS = {
    "": {"eager", "system", "store", "decoding", "speech", *CORE},
    "beam": {"beam/engine", "beam/scorers"},
}
SUBAREAS = {area for area in PYTHON_ALLOWED if "/" in area}


def area_of(parts: Sequence[str]) -> str:
    """Return the area of a module, by the parts of its name below lmdecode."""
    subarea = "/".join(parts[:2])
    return subarea if subarea in SUBAREAS else "".join(parts[:1])


@functools.cache
def python_modules() -> dict[str, Path]:
    """Every file by the name of its module."""
    modules = {}
    for path in python_files():
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        modules[".".join(["lmdecode", *(p for p in parts if p != "__init__")])] = path
    return modules


def imported_files(path: Path) -> set[str]:
    """Every module of the package that a file imports or takes something from."""
    modules, found = python_modules(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {whole if whole in modules else node.module or "" for whole in names}
    return found & modules.keys()


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_imports(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    area = area_of([p for p in parts if p != "__init__"])
    assert area in PYTHON_ALLOWED or area in WINDOWS, f"{area} has no place in the order of areas"
    allowed = set(PYTHON_ALLOWED.get(area, ()))
    if parts[-1] == "__init__" and len(parts) < 3:
        allowed |= WINDOWS.get(area, set())
    for module in sorted(imported_files(path)):
        target = area_of(module.split(".")[1:])
        assert target == area or target in allowed, f"{area} imports {module}"
    third_party = {module.split(".")[0] for module in imported_modules(path)}
    if area not in ("integrations", "integrations/transformers", "readers", "cli", "demo"):
        # The store's second tier imports redis-py, where one is asked for.
        extras = {"transformers"} if area == "store" else {"transformers", "redis"}
        assert not third_party & extras, f"{area} imports {third_party & extras}"


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_private_modules_belong_to_their_folder(path: Path) -> None:
    """A module whose name begins with _ is imported from its folder, and those within it, alone."""
    folder = ["lmdecode", *path.relative_to(PACKAGE).parts[:-1]]
    for module in imported_files(path):
        parts = module.split(".")
        for depth, part in enumerate(parts):
            if part.startswith("_") and not part.startswith("__"):
                assert folder[:depth] == parts[:depth], f"imports {module}"


def outside_files() -> list[Path]:
    folders = (ROOT / folder for folder in ("tests", "benchmarks", "examples"))
    return sorted(path for folder in folders for path in folder.rglob("*.py"))


@pytest.mark.parametrize("path", outside_files(), ids=name)
def test_private_modules_stay_within_the_package(path: Path) -> None:
    """But for the checks of arguments and the way to a device, which have tests of their own."""
    private = {module for module in imported_files(path) if re.search(r"\._(?!_)", module)}
    own = {"lmdecode._checks"} | ({"lmdecode._upload"} if path.name == "test_upload.py" else set())
    assert private <= own, f"imports {private}"


def circle(imports: Mapping[str, Set[str]]) -> list[str]:
    """Return the names of circles, given what each name imports; none where there is no circle."""
    left = {name: targets - {name} for name, targets in imports.items()}
    while True:  # take away what imports nothing that is left
        free = {module for module, targets in left.items() if not targets & left.keys()}
        if not free:
            break
        left = {module: targets for module, targets in left.items() if module not in free}
    # What only imports a circle is not in it.
    while True:
        used = {target for targets in left.values() for target in targets}
        inner = {module: targets for module, targets in left.items() if module in used}
        if len(inner) == len(left):
            break
        left = inner
    return sorted(left)


def test_no_circle_of_imports() -> None:
    """Not even one that closes within a function, or for types alone."""
    imports = {module: imported_files(path) for module, path in python_modules().items()}
    assert circle(imports) == []


def test_no_circle_of_areas() -> None:
    """Neither in what areas import, within functions and for types too, nor in what they may."""
    assert circle(PYTHON_ALLOWED) == []
    imports: dict[str, set[str]] = {}
    for module, path in python_modules().items():
        if path.name != "__init__.py" or area_of(module.split(".")[1:]) not in WINDOWS:
            targets = {area_of(target.split(".")[1:]) for target in imported_files(path)}
            imports.setdefault(area_of(module.split(".")[1:]), set()).update(targets)
    assert circle(imports) == []


def imports_by_name(path: Path) -> Iterator[str]:
    """The names, or their beginnings, that a file gives to ``import_module`` and its kin."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and re.search(
            r"\b(import_module|__import__)$", ast.unparse(node.func)
        ):
            argument = node.args[0]
            if isinstance(argument, ast.JoinedStr):
                argument = argument.values[0]
            yield str(argument.value) if isinstance(argument, ast.Constant) else ""


@pytest.mark.parametrize("path", python_files(), ids=name)
def test_no_import_by_name_goes_around_the_order(path: Path) -> None:
    """A package alone imports its own modules by name, when they are asked for."""
    package = ".".join(["lmdecode", *path.relative_to(PACKAGE).parts[:-1]])
    for module in imports_by_name(path):
        if path.name == "__init__.py":
            assert is_in(module.rstrip("."), package), f"imports {module!r}"
        else:  # what is optional, by a name that is not the package's
            assert not is_in(module.rstrip("."), "lmdecode"), f"imports {module!r}"


def test_one_function_reads_frames() -> None:
    """What generate() does not hand on to its callable: of no other call a frame is read."""
    reads = re.compile(r"_getframe|currentframe|inspect\.stack|f_back")
    found = [name(path) for path in python_files() if reads.search(path.read_text())]
    assert found == ["python/lmdecode/integrations/transformers/generate_call.py"]


# What the reference must not touch: the modules that call ops.
PYTHON_OPS = (
    "lmdecode._ops", "lmdecode._fakes", "lmdecode._C", "lmdecode.attention.ops",
    "lmdecode.attention.ring_cache", "lmdecode.beam.engine",
    "lmdecode.beam.ops", "lmdecode.beam.scorers.beam_scorer",
    "lmdecode.beam.scorers.constrained_beam_scorer", "lmdecode.decoder.batch",
    "lmdecode.decoder.decoding", "lmdecode.decoder.device_loop", "lmdecode.decoder.layer",
    "lmdecode.decoder.searches", "lmdecode.models.packed_stack", "lmdecode.kv_cache",
    "lmdecode.linear.formats", "lmdecode.linear.packed_linear", "lmdecode.linear.quantized_weight",
    "lmdecode.sampling.ops",
)  # fmt: skip
# Folders whose __init__ brings such modules: the reference names the module that it means.
PYTHON_WINDOWS = {"lmdecode", *(f"lmdecode.{area}" for area in [*AREAS, "decoder", "beam.scorers"])}


@pytest.mark.parametrize("path", sorted((PACKAGE / "reference").glob("*.py")), ids=name)
def test_the_reference_uses_no_op(path: Path) -> None:
    modules = imported_files(path)
    compiled = {module for module in modules if is_in(module, *PYTHON_OPS)}
    assert not compiled, f"the reference imports {compiled}"
    assert not modules & PYTHON_WINDOWS, "the reference imports the compiled library by a package"
    assert "torch.ops" not in path.read_text()


# --- Options of generation ------------------------------------------------------------------------

# Where three names of options may stand in a literal, as it is no list of options by a property.
NO_OPTION_TABLES = {
    "beam/engine/request.py": "checks the fields of its own class, by type",
    "cli/chat.py": "settings, in the order of its help",
    "cli/verify_texts.py": "parameters of the compared requests",
    "demo": "parameters of what is shown",
    "integrations/transformers/sampling/fusion.py": "the order of processors",
    "integrations/vllm/beam_search.py": "fields of BeamRequest that need more than the best tokens",
    "reference": "the specification has its own",
    "sampling/sampler_rows.py": "columns of an output, in their order",
    "store/fingerprint.py": "entries of a model's configuration",
}


def texts_of(node: ast.AST) -> Iterator[str]:
    """The constant texts of a tuple, a list, a set or a dict, or of a text that is split."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="split")):
            yield from text.split()
        case ast.Tuple(elts=items) | ast.List(elts=items) | ast.Set(elts=items):
            yield from (i.value for i in items if isinstance(i, ast.Constant))
        case ast.Dict(keys=keys, values=values):
            parts = [part for value in values for part in ast.walk(value)]
            computed = [part.id for part in parts if isinstance(part, ast.Name)]
            # One of variables is the arguments of a call.
            if all(name.isupper() or hasattr(builtins, name) for name in computed):
                yield from (n.value for n in (*keys, *values) if isinstance(n, ast.Constant))


def test_one_table_of_options() -> None:
    """Lists of options are read from ``lmdecode.generation_options``, and stand nowhere else."""
    options, found, allowed = {option.name for option in OPTIONS}, [], set()
    for path in python_files():
        part = str(path.relative_to(PACKAGE))
        areas = {area for area in NO_OPTION_TABLES if f"{part}/".startswith(f"{area}/")}
        for node in ast.walk(ast.parse(path.read_text())):
            named = options & set(texts_of(node))
            if len(named) > 2 and part != "generation_options.py":
                allowed |= areas
                found += [] if areas else [(part, node.lineno, sorted(named))]
    assert found == []
    assert allowed == NO_OPTION_TABLES.keys(), "an exception that is none"


# --- Size -----------------------------------------------------------------------------------------


def source_files() -> list[Path]:
    """Every file of code that is kept here: the library, its tests, its benchmarks."""
    folders = [ROOT / folder for folder in ("csrc", "python", "tests", "benchmarks")]
    found = [path for folder in folders for path in folder.rglob("*")]
    return sorted(path for path in found if path.suffix in {*CPP_SUFFIXES, ".py"})


def test_there_are_files_of_every_kind_to_measure() -> None:
    kinds = {(path.relative_to(ROOT).parts[0], path.suffix) for path in source_files()}
    assert kinds >= {
        ("csrc", ".h"), ("csrc", ".cuh"), ("python", ".py"), ("tests", ".py"), ("tests", ".cpp"),
        ("benchmarks", ".py"),
    }  # fmt: skip


@pytest.mark.parametrize("path", source_files(), ids=name)
def test_no_file_is_too_long(path: Path) -> None:
    lines = path.read_text().count("\n")
    assert lines <= MAX_LINES, f"{lines} lines; expected at most {MAX_LINES}"
