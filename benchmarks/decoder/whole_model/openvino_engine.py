"""OpenVINO as an engine of the benchmark, models exported by optimum-intel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino.opset13 as ops

from benchmarks.decoder.whole_model.engine import Engine

# File and precision of the arithmetic.
_FORMATS = {"f32": ("f32", "f32"), "bf16": ("f32", "bf16"), "int8": ("int8", None),
            "int4": ("int4", None)}  # fmt: skip


def export(folder: Path, weights: str, to: Path) -> None:
    """Write a model with float32, int8 or, in groups of 128, int4 weights."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    quantisation = {
        "f32": None,
        "int8": OVWeightQuantizationConfig(bits=8, sym=False),
        "int4": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
    }[weights]
    options = {"load_in_8bit": False} if quantisation is None else {}
    model = OVModelForCausalLM.from_pretrained(
        folder, export=True, compile=False, quantization_config=quantisation, **options
    )
    model.save_pretrained(to)


def _exported(folder: Path, weights: str) -> Path:
    """Return the folder of an exported model; in a process of its own, for its memory."""
    to = folder / f"openvino-{weights}"
    if not to.exists():
        partial = folder / f"openvino-{weights}.{os.getpid()}"
        shutil.rmtree(partial, ignore_errors=True)
        code = f"from {__name__} import export; from pathlib import Path; import torch; "
        code += "torch.set_num_threads(1); "
        code += f"export(Path({str(folder)!r}), {weights!r}, Path({str(partial)!r}))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"the export ended: {done.stderr.strip().splitlines()[-1:]}")
        partial.rename(to)
    return to


def _for_last_tokens(model: openvino.Model) -> openvino.Model:
    """Let a model compute the logits behind the last tokens alone, as openvino-genai does."""
    head = model.output("logits").get_node()
    while head.get_type_name() != "MatMul":
        head = head.input_value(0).get_node()
    begin, end, one = (ops.constant([value], np.int64) for value in (-1, 2**63 - 1, 1))
    last = ops.slice(head.input_value(0), begin, end, one, one)
    head.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    return model


class OpenVinoEngine(Engine):
    """A stateful model, whose state grows and cannot be cut: steps go on from each other."""

    def __init__(self, folder: Path, number_format: str, threads: int, longest: int) -> None:
        super().__init__(folder, number_format, threads, longest)
        weights, precision = _FORMATS[number_format]
        options: dict[str, Any] = {
            "INFERENCE_NUM_THREADS": threads,
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        if precision is not None:
            options["INFERENCE_PRECISION_HINT"] = precision
        file = _exported(folder, weights) / "openvino_model.xml"
        core = openvino.Core()
        model = core.compile_model(_for_last_tokens(core.read_model(file)), "CPU", options)
        self._inputs = {name for i in model.inputs for name in i.get_names()}
        self._request = model.create_infer_request()

    def version(self) -> str:
        return openvino.__version__.partition("-")[0]

    def _read(self, rows: Any) -> None:
        count, length = rows.shape
        end = self._length + length
        inputs = {"input_ids": rows, "attention_mask": np.ones((count, end), np.int64)}
        if "position_ids" in self._inputs:
            inputs["position_ids"] = np.tile(np.arange(self._length, end), (count, 1))
        if "beam_idx" in self._inputs:
            inputs["beam_idx"] = np.arange(count, dtype=np.int32)
        self._request.start_async(inputs, share_inputs=True)
        self._request.wait()
        self._length = end

    def _reset(self) -> None:
        self._request.reset_state()
        self._length = 0

    def logits(self, tokens: Sequence[int], steps: int) -> Any:
        self._reset()
        self._read(np.array([tokens[: len(tokens) - steps]]))
        for token in tokens[len(tokens) - steps :]:
            self._read(np.array([[token]]))
        return self._request.get_tensor("logits").data[0, -1].astype(np.float32)

    def prefill(self, tokens: Sequence[int]) -> None:
        self._reset()
        self._read(np.array([tokens]))

    def prepare(self, tokens: Sequence[int], rows: int) -> None:
        self._reset()
        self._read(np.array([tokens] * rows))

    def rewind(self) -> None:
        pass  # a state cannot be cut

    def step(self, tokens: Sequence[int]) -> None:
        self._read(np.array([[token] for token in tokens]))


ENGINE = OpenVinoEngine
