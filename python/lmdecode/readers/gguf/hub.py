"""GGUF files of the hub's local cache, by the name of a model and of a quantization."""

from __future__ import annotations

import os
import re
from pathlib import Path

__all__ = ["cached_gguf"]

_NAME = re.compile(r"([\w.-]+)/([\w.-]+):([\w.-]+)")
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_SHOWN = 12


def _cache() -> Path:
    """Return the folder of the hub's cache, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    home = os.environ.get("HF_HOME")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home or os.path.join(base, "huggingface")).expanduser() / "hub"


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_SHOWN} others" if len(names) > _MOST_SHOWN else ""
    return (", ".join(names[:_MOST_SHOWN]) or "nothing") + more


def cached_gguf(op: str, source: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Return the file, or the first part, that a name like "owner/model:Q4_K_M" means.

    It is a file of the hub's cache whose name ends in the quantization, in the newest snapshot that
    has one. What is no such name is returned as it is. Raises FileNotFoundError that says what is
    there, and ValueError where the name means several files.
    """
    match = _NAME.fullmatch(source) if isinstance(source, str) else None
    if match is None or os.path.exists(source):
        return source
    owner, name, quant = match.groups()
    cache = _cache()
    folder = cache / f"models--{owner}--{name}" / "snapshots"
    snapshots = [path for path in folder.glob("*") if path.is_dir()]
    if not snapshots:
        models = [path.parts[-2] for path in sorted(cache.glob("models--*--*/snapshots"))]
        known = [model.removeprefix("models--").replace("--", "/", 1) for model in models]
        raise FileNotFoundError(
            f"{op}: there is no model {owner}/{name} in {cache}; it has {_shown(known)}"
        )
    seen: set[str] = set()
    ends = re.compile(rf"(.*[-.])?{re.escape(quant)}", re.IGNORECASE)
    for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime, reverse=True):
        files: dict[str, Path] = {}
        for path in sorted(snapshot.rglob("*.gguf"), reverse=True):  # the first part comes last
            if path.is_file() and not path.name.startswith("mmproj"):  # it is of images
                files[_PART.sub("", path.stem)] = path
        found = sorted(filter(ends.fullmatch, sorted(files)), key=len)
        found = [stem for stem in found if len(stem) == len(found[0])]  # "UD-Q4_K_M" is longer
        if len(found) > 1:
            raise ValueError(f"{op}: {source} may be {_shown(found)}; expected one of them")
        if found:
            return files[found[0]]
        seen |= files.keys()
    raise FileNotFoundError(
        f"{op}: there is no GGUF file of {quant} in {folder}; it has {_shown(sorted(seen))}"
    )
