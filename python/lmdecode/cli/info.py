"""``lmdecode info``: what is installed, or what a model is, without loading its weights."""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path
from typing import Any

import torch

import lmdecode
from lmdecode.cli import COMMANDS
from lmdecode.cli.options import MODEL_HELP
from lmdecode.models.saved import MANIFEST
from lmdecode.readers.ctranslate2.folder import is_ctranslate2
from lmdecode.readers.gguf.reader import GgufFile, is_gguf
from lmdecode.serving.text_model import local_path
from lmdecode.serving.tokenizer import Tokenizer, read_json
from lmdecode.system import built_cpu_capabilities

__all__ = ["add_command"]


def add_command(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command to a parser's commands."""
    parser = commands.add_parser(
        "info",
        help=COMMANDS["info"],
        description="Print versions, CPU capability, CUDA and the ops that are loaded; or what a "
        "model is.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    facts = _installed() if given.model is None else _model(local_path(given.model))
    for name, value in facts.items():
        print(f"{name:<14}  {value}")
    return 0


def _installed() -> dict[str, str]:
    forced = os.environ.get("LMDECODE_CPU_CAPABILITY")
    if lmdecode.has_cuda():
        available = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if available else "no device found"
        cuda = f"kernels loaded, {device}"
    else:
        why = "this torch has no CUDA" if torch.version.cuda is None else "kernels not built"
        cuda = f"off: {why}"
    names = sorted({n.removeprefix("lmdecode::") for n in torch._C._dispatch_get_all_op_names()
                    if n.startswith("lmdecode::")})  # fmt: skip
    return {
        "lmdecode": lmdecode.__version__,
        "torch": torch.__version__,
        "python": f"{platform.python_version()} on {platform.machine()}",
        "CPU capability": lmdecode.cpu_capability() + (" (forced)" if forced else ""),
        "CPU levels": ", ".join(built_cpu_capabilities()) + " (built)",
        "threads": str(torch.get_num_threads()),
        "CUDA": cuda,
        "ops": ", ".join(names),
    }


def _size(path: Path) -> str:
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return f"{sum(file.stat().st_size for file in files) / 1e6:,.1f} MB"


def _model(path: Path) -> dict[str, str]:
    facts = {"model": str(path), "size": _size(path)}
    if is_gguf(path):
        metadata = GgufFile(path).metadata
        kind = metadata.get("general.architecture")
        facts |= {"kind": f"{kind} in a GGUF file"}
        facts |= {"context": str(metadata.get(f"{kind}.context_length", "not told"))}
    else:
        config = read_json(path / "config.json")
        facts["kind"] = f"{config.get('model_type', 'a model')} of transformers"
        manifest = read_json(path / MANIFEST)
        if manifest:
            facts["kind"] = f"{config.get('model_type', manifest.get('kind'))} saved by lmdecode"
            facts["weights"] = str(manifest.get("weight_format"))
        elif is_ctranslate2(path):
            facts["kind"] = "a model of CTranslate2"
        facts["context"] = str(config.get("max_position_embeddings", "not told"))
    try:
        tokenizer = Tokenizer.load(path)
    except (OSError, ValueError) as error:
        facts["tokenizer"] = f"none: {error}"
        return facts
    facts["tokenizer"] = f"{tokenizer.vocab_size:,} tokens"
    facts["chat template"] = "none" if tokenizer.chat_template is None else "there is one"
    return facts
