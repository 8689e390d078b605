"""``Sampler`` in llama.cpp's order against its own samplers; skipped without llama-cpp-python."""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.sampler_float64 import Array, Rows
from tests.support.sampler_parameters import make_parameters
from tests.support.sampler_rows import (
    FLOAT32_MARGIN,
    kept_by,
    make_rows,
    make_text,
    row_of,
    single_and_pairs,
)
from tests.support.samplers import SamplerUnderTest

INF = np.inf


@pytest.fixture(scope="module")
def llama() -> Any:
    return pytest.importorskip(
        "llama_cpp", reason="llama.cpp is not installed: pip install llama-cpp-python"
    )


# The arguments of each llama_sampler_init_*, from a row's parameters.
LLAMA_STAGES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "top_n_sigma": lambda lib, p: lib.llama_sampler_init_top_n_sigma(p["top_n_sigma"]),
    "top_k": lambda lib, p: lib.llama_sampler_init_top_k(p["top_k"]),
    "typical": lambda lib, p: lib.llama_sampler_init_typical(p["typical_p"], 1),
    "top_p": lambda lib, p: lib.llama_sampler_init_top_p(p["top_p"], 1),
    "min_p": lambda lib, p: lib.llama_sampler_init_min_p(p["min_p"], 1),
    "xtc": lambda lib, p: lib.llama_sampler_init_xtc(
        p["xtc_probability"], p["xtc_threshold"], 1, 1
    ),
    "temperature": lambda lib, p: lib.llama_sampler_init_temp_ext(
        p["temperature"], p["dynamic_temperature_range"], p["dynamic_temperature_exponent"]
    ),
    "mirostat": lambda lib, p: lib.llama_sampler_init_mirostat_v2(1, p["mirostat_tau"], 0.1),
}


class LlamaChain:
    """A chain of llama.cpp's samplers."""

    def __init__(self, llama: Any, samplers: list[Any]) -> None:
        self.llama = llama
        self.chain = llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params())
        for sampler in samplers:
            llama.llama_sampler_chain_add(self.chain, sampler)

    def _apply(self, x: Array) -> tuple[Any, Array]:
        data = np.zeros(len(x), dtype=[("id", np.int32), ("logit", np.float32), ("p", np.float32)])
        data["id"], data["logit"] = np.arange(len(x)), x
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(self.llama.llama_token_data))
        array = self.llama.llama_token_data_array(
            data=pointer, size=len(x), selected=-1, sorted=False
        )
        self.llama.llama_sampler_apply(self.chain, ctypes.byref(array))
        return array, data  # which the array points to

    def apply_and_select(self, x: Array) -> int:
        """Return the token that the last sampler selects."""
        array, _data = self._apply(x)
        return array.data[array.selected].id

    def apply(self, x: Array) -> tuple[Array, Array]:
        """Return the ids and the logits that are left of a row [V], largest logit first."""
        array, _data = self._apply(x)
        left = [(array.data[i].id, array.data[i].logit) for i in range(array.size)]
        left = sorted((t for t in left if t[1] > -INF), key=lambda t: (-t[1], t[0]))
        return np.array([t[0] for t in left]), np.array([t[1] for t in left], np.float32)

    def accept(self, tokens: list[int]) -> None:
        for token in tokens:
            self.llama.llama_sampler_accept(self.chain, token)

    def __del__(self) -> None:
        self.llama.llama_sampler_free(self.chain)


# What top-n-sigma filters stays in llama.cpp's list with the logit -inf. Its typical sampler then
# computes 0 * log(0), and its dynamic temperature counts these tokens too.
LLAMA_PAIRS = [
    stages
    for stages in single_and_pairs(" ".join(LLAMA_STAGES))
    if not {"top_n_sigma", "typical"} <= set(stages)
    and ("mirostat" not in stages or set(stages) <= {"temperature", "mirostat"})  # it is alone
]


@pytest.mark.parametrize("stages", LLAMA_PAIRS, ids="-".join)
def test_llama_cpp(stages: tuple[str, ...], sampler: SamplerUnderTest, llama: Any) -> None:
    random = np.random.default_rng([len(stages), *map(ord, "".join(stages))])
    compared = 0
    for vocab in (3, 40, 333, 3000):
        batch = round((100 if vocab < 1000 else 20) * max(sampler.share, 0.3))
        x = make_rows(random, batch, vocab, masked=False)
        parameters = make_parameters(random, stages, batch, vocab)
        if "temperature" in stages:
            # A range: only where nothing is -inf, and not beside mirostat.
            if "top_n_sigma" in stages or "mirostat" in stages:
                parameters["dynamic_temperature_range"][:] = 0
        if "min_p" in stages:  # at 1 all that equal the maximum stay
            parameters["min_p"] = np.minimum(parameters["min_p"], 0.99)
        if "xtc" in stages:  # at 0 the last of what top-n-sigma filtered would stay
            parameters["xtc_threshold"] = np.maximum(parameters["xtc_threshold"], 1e-5)
        # It adds up one float32 after the other.
        rows = Rows(x, parameters, "llama.cpp", FLOAT32_MARGIN + 2e-8 * vocab)
        rows.run()
        kept, kept_logits = kept_by(sampler, x, parameters, "llama.cpp")
        for row in np.flatnonzero(rows.decided):
            values = row_of(parameters, row)
            chain = LlamaChain(llama, [LLAMA_STAGES[stage](llama, values) for stage in LLAMA_STAGES
                                       if stage in stages])  # fmt: skip
            ids, logits = chain.apply(x[row])
            message = f"{values}, V {vocab}, {x[row]}"
            # Its sorts are unstable: of equal logits at the end any stay.
            ours = np.sort(kept_logits[row][kept[row]])[::-1]
            assert len(ours) == len(logits), message
            if len(ours) > 1:  # of a single one it leaves the temperature out
                np.testing.assert_allclose(ours, logits, 2e-4, 1e-5, err_msg=message)
            inner = np.sort(x[row][ids]) if len(ids) else ids
            np.testing.assert_array_equal(np.sort(x[row][kept[row]]), inner, err_msg=message)
            compared += 1
    assert compared > 60


def test_llama_cpp_penalties(sampler: SamplerUnderTest, llama: Any) -> None:
    """Repetition, frequency and presence see prompt and output."""
    random = np.random.default_rng(0)
    vocab = 30
    for _ in range(100):
        prompt, output = make_text(random, vocab)
        x = make_rows(random, 1, vocab)
        repetition, frequency, presence = random.choice([1.0, 1.3, 0.7]), *random.choice(
            [0.0, 0.3, -0.2], 2
        )  # fmt: skip
        penalties = llama.llama_sampler_init_penalties(vocab, 64, repetition, frequency, presence)
        chain = LlamaChain(llama, [penalties])
        chain.accept(prompt + output)
        ids, logits = chain.apply(x[0])
        tested = sampler.make(
            1, vocab, dialect="llama.cpp", seed=-1, return_logits=True,
            repetition_penalty=repetition, frequency_penalty=frequency, presence_penalty=presence,
        )  # fmt: skip
        tested.insert(0, prompt=prompt)
        tested.accept(0, output)
        kept_logits = tested.sample(torch.from_numpy(x)).kept_logits[0].numpy()
        # It subtracts both penalties at once.
        np.testing.assert_allclose(kept_logits[ids], logits, rtol=1e-6, atol=1e-6)
        assert (kept_logits > -INF).sum() == len(ids)


def test_llama_cpp_dry(sampler: SamplerUnderTest, llama: Any) -> None:
    """Without breakers: these want a vocabulary."""
    random = np.random.default_rng(0)
    vocab = 20
    penalised = 0
    for _ in range(150):
        length = int(random.integers(0, 60))
        text = random.integers(0, random.integers(1, 5), length).tolist()
        multiplier, base = float(random.choice([0.8, 2.0])), float(random.choice([1.75, 1.0, 3.0]))
        allowed = int(random.integers(0, 5))
        x = make_rows(random, 1, vocab, masked=False)
        chain = LlamaChain(
            llama, [llama.llama_sampler_init_dry(None, multiplier, base, allowed, 100, None, 0)]
        )
        chain.accept(text)
        ids, logits = chain.apply(x[0])
        tested = sampler.make(
            1, vocab, dialect="llama.cpp", seed=-1, return_logits=True, dry_multiplier=multiplier,
            dry_base=base, dry_allowed_length=allowed,
        )  # fmt: skip
        cut = length // 2
        tested.insert(0, prompt=text[:cut])
        tested.accept(0, text[cut:])
        kept_logits = tested.sample(torch.from_numpy(x)).kept_logits[0].numpy()
        np.testing.assert_allclose(kept_logits[ids], logits, rtol=1e-5, err_msg=str(text))
        penalised += int((kept_logits != x[0]).any())
    assert penalised > 50


def test_llama_cpp_mirostat_learns(sampler: SamplerUnderTest, llama: Any) -> None:
    """Rows of 2^n equal tokens have a surprise of n bits, whichever is drawn."""
    random = np.random.default_rng(0)
    vocab = 256
    for tau in (1.0, 3.0, 5.0):
        chain = LlamaChain(llama, [llama.llama_sampler_init_mirostat_v2(1, tau, 0.1)])
        tested = sampler.make(1, vocab, dialect="llama.cpp", seed=1, return_logits=True,
                              mirostat_tau=tau, mirostat_eta=0.1)  # fmt: skip
        for step in range(40):
            if step % 4 == 3:
                x = make_rows(random, 1, vocab, masked=False)
                out = tested.sample(torch.from_numpy(x), accept=False)
                copy = llama.llama_sampler_clone(chain.chain)
                other = LlamaChain(llama, [copy])
                ids, _ = other.apply(x[0])
                kept = (out.kept_logits[0] > -INF).nonzero().flatten().tolist()
                assert sorted(x[0][ids]) == sorted(x[0][kept])
                continue
            bits = int(random.integers(0, 8))
            x = np.full((1, vocab), -40, np.float32)
            x[0, : 2**bits] = 0
            chain.apply(x[0])
            tested.sample(torch.from_numpy(x))


def test_llama_cpp_adaptive_p(sampler: SamplerUnderTest, llama: Any) -> None:
    """Its logits behind min-p, and what its mean learns from tokens of a known probability."""
    random = np.random.default_rng(0)
    vocab, compared = 256, 0
    for target, decay in ((0.0, 0.9), (0.3, 0.0), (0.5, 0.9), (0.55, 0.99), (1.0, 0.5)):
        chain = LlamaChain(
            llama,
            [
                llama.llama_sampler_init_min_p(0.01, 1),
                llama.llama_sampler_init_adaptive_p(target, decay, 1),
            ],
        )
        tested = sampler.make(1, vocab, dialect="llama.cpp", seed=1, return_logits=True, min_p=0.01,
                              adaptive_target=target, adaptive_decay=decay)  # fmt: skip
        for step in range(40):
            if step % 4 == 3:
                x = make_rows(random, 1, vocab, masked=False)
                out = tested.sample(torch.from_numpy(x), accept=False).kept_logits[0].numpy()
                ids, logits = LlamaChain(
                    llama, [llama.llama_sampler_clone(chain.chain)]
                ).apply(x[0])  # fmt: skip
                if (out > -INF).sum() == len(ids):  # else a tie at min-p's bound
                    np.testing.assert_allclose(
                        np.sort(out[out > -INF]), np.sort(logits), 1e-4, 1e-4
                    )
                    compared += 1
                continue
            x = np.full((1, vocab), -40, np.float32)
            x[0, : 2 ** int(random.integers(0, 8))] = 0
            chain.accept([chain.apply_and_select(x[0])])
            tested.sample(torch.from_numpy(x))
    assert compared > 30
