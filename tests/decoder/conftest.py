"""What is expected of tests of the decoder where a CPU, or its level, has no FMA."""

from __future__ import annotations

import pytest

import lmdecode

# They compare two float32 computations of models that make much of the last bits, which torch
# rounds with FMA. How far either is from float64 is in test_float64_errors.py.
_LAST_BITS = (
    "test_causal_generate.py::test_greedy_tokens[granite-plain]",
    "test_causal_generate.py::test_greedy_tokens[qwen3_5_moe_text-plain]",
    "test_causal_generate.py::test_beams[qwen3-plain]",
    *(
        f"test_decoding_generate.py::test_tokens_are_those_of_generate[{kind}-{num_beams}]"
        for kind in ("mt5", "t5_gated")
        for num_beams in (4, 5, 8)
    ),
    "test_decoding_generate.py::test_scores_and_logits_of_each_step"
    "[no_repeat_ngram_size+repetition_penalty+min_new_tokens-4]",
)


_XFAIL = pytest.mark.xfail(raises=AssertionError, reason="last bits: see test_float64_errors.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if lmdecode.cpu_capability() != "default":
        return
    for item in items:
        if item.nodeid.endswith(_LAST_BITS):
            item.add_marker(_XFAIL)
