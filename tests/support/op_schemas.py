"""What csrc/bindings/op_schemas.h says: where an op is registered, and nowhere else."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

CSRC = Path(__file__).resolve().parents[2] / "csrc"


@dataclass(frozen=True)
class OpSchema:
    """An op or an overload, such as ``lmdecode::top_k_top_p_sample.out``."""

    name: str
    is_cpu_only: bool


def op_names() -> list[str]:
    """Return names with overloads, such as ``lmdecode::top_k_top_p_sample.out``."""
    names = torch._C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith("lmdecode::"))


def op_schemas() -> list[OpSchema]:
    """Return none where csrc is not there: it is in source checkouts alone."""
    path = CSRC / "bindings" / "op_schemas.h"
    if not path.is_file():
        return []
    text = path.read_text()
    text = re.sub(r"//[^\n]*", "", text[text.index("kOpSchemas[] = {") :])
    found = re.findall(r'\{"([\w.]+)\(.*?(Devices::kCpuOnly)?\}', text, re.DOTALL)
    return [OpSchema(f"lmdecode::{name}", bool(devices)) for name, devices in found]
