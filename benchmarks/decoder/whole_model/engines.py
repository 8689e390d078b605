"""The engines that are compared, and that they compute the same model."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.decoder.whole_model import models
from benchmarks.decoder.whole_model.process import EngineProcess, python_of
from benchmarks.decoder.whole_model.worker import agreement
from benchmarks.harness import OURS

TRANSFORMERS, LLAMA, LLAMA_HEAD = "transformers", "llama.cpp", "llama.cpp, head too"
OPENVINO, CTRANSLATE2 = "OpenVINO", "CTranslate2"
DYNAMIC, TORCHAO, PACKED = "quantize_dynamic", "torchao", "pack_linears_"
MODULES = {
    # The environment, what must be in it, and the engine's module.
    TRANSFORMERS: ("torch", ("torch", "transformers"), "transformers_engine"),
    PACKED: ("torch", ("torch", "transformers"), "transformers_engine"),
    DYNAMIC: ("torch", ("torch", "transformers"), "transformers_engine"),
    TORCHAO: ("torchao", ("torch", "transformers", "torchao"), "transformers_engine"),
    LLAMA: ("llama_cpp", ("llama_cpp", "gguf", "safetensors"), "llama_cpp_engine"),
    LLAMA_HEAD: ("llama_cpp", ("llama_cpp", "gguf", "safetensors"), "llama_cpp_engine"),
    OPENVINO: ("openvino", ("openvino", "optimum"), "openvino_engine"),
    CTRANSLATE2: ("ctranslate2", ("ctranslate2", "transformers"), "ctranslate2_engine"),
}
# What each engine calls the format that it is compared in.
PEER_FORMATS = {
    "float32": {TRANSFORMERS: "float32", LLAMA: "F32", OPENVINO: "f32"},
    "bfloat16": {TRANSFORMERS: "bfloat16", LLAMA: "BF16", OPENVINO: "bf16"},
    "int8": {
        TRANSFORMERS: "bfloat16", LLAMA: "Q8_0", OPENVINO: "int8", CTRANSLATE2: "int8",
        DYNAMIC: DYNAMIC, PACKED: "pack_linears_ int8",
    },
    "int4": {
        TRANSFORMERS: "bfloat16", LLAMA: "Q4_0", LLAMA_HEAD: "Q4_0, head too", OPENVINO: "int4",
        TORCHAO: "torchao int4", PACKED: "pack_linears_ int4",
    },
}  # fmt: skip
# Logits of the same weights: the largest difference of float32, the correlation of the others.
LARGEST_DIFFERENCE = 1e-3
LEAST_CORRELATION = {"bfloat16": 0.99, "int8": 0.98, "int4": 0.5}


class Engines:
    """The engines of one model in one format, all of the same weights; ours is in this process."""

    def __init__(self) -> None:
        self._key: object = None
        self._calls: dict[str, Callable[..., float]] = {}
        self._processes: list[EngineProcess] = []
        self.left_out: dict[str, str] = {}
        self.about: dict[str, str] = {}

    def close(self) -> None:
        """End the processes and free ours."""
        for process in self._processes:
            process.close()
        self._processes, self._calls, self._key = [], {}, None

    def open(
        self, model: str, dtype: str, longest: int, threads: int, peers: tuple[str, ...]
    ) -> dict[str, Callable[..., float]]:
        """Return what calls a method of each engine, by name."""
        key = (model, dtype, longest, threads, peers)
        if key != self._key:
            self.close()
            self._calls = dict(self._start(*key))
            self._key = key
        return self._calls

    def _start(
        self, model: str, dtype: str, longest: int, threads: int, peers: tuple[str, ...]
    ) -> Iterator[tuple[str, Callable[..., float]]]:
        from benchmarks.decoder.whole_model.ours import LmdecodeEngine

        folder = models.model_folder(model)
        # Ours first: what it is packed from is freed before others take memory.
        ours = LmdecodeEngine(folder, dtype, threads, longest)
        expected = np.load(folder / "expected.npz")
        found = ours.logits(expected["tokens"].tolist(), int(expected["steps"]))
        about = agreement(found, expected["logits"])
        if not self.agrees(f"{OURS} of model {model}, {dtype}", dtype, about):
            raise RuntimeError(f"whole_model: the logits of {OURS} are not those of {TRANSFORMERS}")
        yield OURS, lambda name, *arguments: getattr(ours, name)(*arguments)
        setup = {"folder": str(folder), "threads": threads, "longest": longest}
        setup["expected"] = str(folder / "expected.npz")
        for name in peers:
            number_format = PEER_FORMATS[dtype][name]
            environment, packages, module = MODULES[name]
            python = python_of(environment, packages)
            label = f"{name} of model {model}, {number_format}"
            if python is None:
                self._leave_out(label, f"not installed: {', '.join(packages)}")
                continue
            process = EngineProcess(
                python, {**setup, "module": module, "number_format": number_format}
            )
            self._processes.append(process)
            try:
                about = process.about()
            except RuntimeError as error:
                self._leave_out(label, str(error))
                continue
            compared = "bfloat16" if number_format == "bfloat16" else dtype
            if self.agrees(label, compared, about):
                self.about[name] = about["version"]
                yield name, process.call

    def agrees(self, label: str, dtype: str, about: dict[str, Any]) -> bool:
        """Tell whether an engine computes the same model; else it is left out."""
        difference, correlation = about["difference"], about["correlation"]
        if dtype == "float32":
            same = difference <= LARGEST_DIFFERENCE
        else:
            same = correlation >= LEAST_CORRELATION[dtype]
        if not same:
            reason = f"logits differ by {difference:.2g}, correlation {correlation:.3f}"
            self._leave_out(label, reason)
        return same

    def _leave_out(self, label: str, reason: str) -> None:
        if label not in self.left_out:
            print(f"whole_model: without {label}: {reason}", file=sys.stderr)
        self.left_out[label] = reason


ENGINES = Engines()
atexit.register(ENGINES.close)
