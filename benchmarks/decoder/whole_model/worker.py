"""An engine in a process of its own: reads lines of JSON, answers each with one.

The first line names the engine, the arguments of its constructor and what its logits are compared
with. Each other one is the name of a method and its arguments.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def agreement(logits: Any, expected: Any) -> dict[str, float]:
    """Compare logits [V] float32 of two engines: the largest difference, and the correlation."""
    import numpy as np

    if logits.shape != expected.shape:
        raise ValueError(f"logits have shape {logits.shape}; expected {expected.shape}")
    return {
        "difference": float(np.abs(logits - expected).max()),
        "correlation": float(np.corrcoef(logits, expected)[0, 1]),
    }


def _load(setup: dict[str, Any]) -> tuple[Any, dict[str, object]]:
    import numpy as np

    code = importlib.import_module(f"benchmarks.decoder.whole_model.{setup['module']}")
    engine = code.ENGINE(
        Path(setup["folder"]), setup["number_format"], setup["threads"], setup["longest"]
    )
    expected = np.load(setup["expected"])
    found = engine.logits(expected["tokens"].tolist(), int(expected["steps"]))
    return engine, {"version": engine.version(), **agreement(found, expected["logits"])}


def _answers(lines: Any) -> Callable[[object], None]:
    def answer(value: object) -> None:
        print(json.dumps(value), file=lines, flush=True)

    return answer


def main() -> None:
    """Serve until the input ends."""
    # Nothing else may write to the pipe of the answers.
    answer = _answers(os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    engine = None
    for line in sys.stdin:
        question = json.loads(line)
        try:
            if engine is None:
                engine, about = _load(question)
                answer(about)
            else:
                answer(getattr(engine, question["call"])(*question["arguments"]))
        except Exception as error:  # whatever a peer throws is the answer
            answer({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    main()
