"""Continuous batching: the texts of ``generate()``, whatever else is in the batch or a store."""

from __future__ import annotations

import copy
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from window_models import MODELS, VOCAB, build_window_model

from lmdecode.integrations.transformers import (
    BatchingManager,
    generate_batch,
    generate_with_store,
    sample,
)
from lmdecode.integrations.transformers.continuous_batching import batching_manager as options
from lmdecode.integrations.transformers.continuous_batching.attention import NAME
from lmdecode.store import Fingerprint, FingerprintMismatchError, KVStore
from tests.support.processes import run_python

PROMPTS = 32
NEW_TOKENS = 20
STAGES = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}


def prompts(count: int = PROMPTS) -> list[list[int]]:
    """Return prompts of 1 to 40 tokens, some of which begin alike."""
    generator = torch.Generator().manual_seed(5)
    lengths = [1 + 13 * i % 40 for i in range(count)]
    shared = torch.randint(3, VOCAB, (20,), generator=generator).tolist()
    texts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths]
    return [shared[:n] + text[20:] if i % 3 == 0 else text for i, (n, text) in
            enumerate(zip(lengths, texts, strict=True))]  # fmt: skip


def config(**options: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=NEW_TOKENS, eos_token_id=2, pad_token_id=0, bos_token_id=1, **options
    )


def batching(num_blocks: int = 64, max_batch_tokens: int = 64, **options: Any) -> Any:
    return ContinuousBatchingConfig(
        page_size=16, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens, **options
    )


def one_by_one(model: Any, texts: list[list[int]], settings: Any, seeds: Any = None) -> list[Any]:
    results = []
    for row, text in enumerate(texts):
        seed = {} if seeds is None else {"seed": [seeds[row]]}
        ids = model.generate(
            torch.tensor([text]), generation_config=settings, custom_generate=sample, **seed
        )
        results.append(ids[0, len(text) :].tolist())
    return results


def texts_of(outputs: dict[str, Any]) -> list[list[int]]:
    assert [output.error for output in outputs.values()] == [None] * len(outputs)
    return [output.generated_tokens for output in outputs.values()]


@pytest.fixture(scope="module")
def llama() -> Any:
    return build_window_model("Llama")


@pytest.mark.parametrize("name", MODELS)
def test_texts_are_those_of_generate(name):
    """32 prompts of mixed lengths in chunks of at most 64 tokens, with windows and without."""
    model = build_window_model(name)
    settings = config(do_sample=False)
    got = generate_batch(model, prompts(), settings, batching())
    assert texts_of(got) == one_by_one(model, prompts(), settings)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2"])
def test_sampled_texts_are_those_of_generate_with_the_same_seeds(name):
    model = build_window_model(name)
    settings = config(do_sample=True, **STAGES)
    seeds = [2**62 + 977 * i for i in range(PROMPTS)]
    got = texts_of(generate_batch(model, prompts(), settings, batching(), seed=seeds))
    assert got == one_by_one(model, prompts(), settings, seeds)
    assert len(set(map(tuple, got))) > PROMPTS // 2


def test_one_seed_is_expanded_as_for_the_rows_of_a_batch(llama):
    settings = config(do_sample=True, **STAGES)
    texts = [text[:7] for text in prompts() if len(text) >= 7][:6]
    got = texts_of(generate_batch(llama, texts, settings, batching(), seed=9))
    ids = llama.generate(
        torch.tensor(texts), generation_config=settings, custom_generate=sample, seed=9
    )
    for text, row in zip(got, ids[:, 7:].tolist(), strict=True):
        assert text == row[: len(text)]
        assert not any(row[len(text) :])  # padding behind the end token


def test_a_request_has_its_text_in_any_company(llama):
    """Others that share its prompt's start, fewer tokens a batch, too few blocks for all."""
    settings = config(do_sample=True, **STAGES)
    texts, seeds = prompts(12), list(range(12))
    together = texts_of(generate_batch(llama, texts, settings, batching(), seed=seeds))
    companies = [
        batching(max_batch_tokens=16),
        batching(num_blocks=10),  # requests are put back and computed again
        batching(allow_block_sharing=False),
        batching(max_requests_per_batch=2),
    ]
    for company in companies:
        assert texts_of(generate_batch(llama, texts, settings, company, seed=seeds)) == together
    backwards = generate_batch(llama, texts[::-1], settings, batching(), seed=seeds[::-1])
    assert texts_of(backwards) == together[::-1]


def test_parameters_of_a_request(llama):
    """What a request has is used; what it has not is the generation config's."""
    settings = config(do_sample=True, temperature=0.8, top_p=0.9)
    texts = prompts(5)
    own: list[dict[str, Any]] = [
        {},
        {"temperature": 1.3, "top_k": 5},
        {"top_k": 1},
        {"temperature": 0.0},
        {"min_p": 0.3, "top_p": 1.0},
    ]
    manager = BatchingManager(llama, settings, batching())
    manager.start()
    try:
        for row, (text, arguments) in enumerate(zip(texts, own, strict=True)):
            manager.add_request(text, f"mine {row}", seed=40 + row, **arguments)
        got = {}
        while len(got) < len(texts):
            output = manager.get_result(timeout=60)
            got[output.request_id] = output.generated_tokens
    finally:
        manager.stop(block=True)
    for row, (text, arguments) in enumerate(zip(texts, own, strict=True)):
        if arguments.get("temperature") == 0.0:
            expected = one_by_one(llama, [text], config(do_sample=False))
        else:
            merged = {"temperature": 0.8, "top_p": 0.9, "top_k": 0} | arguments
            expected = one_by_one(llama, [text], config(do_sample=True, **merged), [40 + row])
        assert got[f"mine {row}"] == expected[0], arguments


def test_log_probabilities_are_those_of_transformers(llama):
    """Greedily, and sampled: the log-softmax of the processed scores of the token."""
    texts = prompts(6)
    for do_sample in (False, True):
        settings = config(do_sample=do_sample, **(STAGES if do_sample else {}))
        seeds = list(range(6)) if do_sample else None
        got = generate_batch(llama, texts, settings, batching(return_logprobs=True), seed=seeds)
        for row, (text, output) in enumerate(zip(texts, got.values(), strict=True)):
            seed = {"seed": [seeds[row]]} if seeds else {}
            run = llama.generate(
                torch.tensor([text]), generation_config=settings, custom_generate=sample,
                output_scores=True, return_dict_in_generate=True, **seed,
            )  # fmt: skip
            scores = torch.cat(run.scores).log_softmax(-1)
            tokens = run.sequences[0, len(text) :]
            expected = scores.gather(1, tokens[:, None])[:, 0]
            assert torch.tensor(output.logprobs) == pytest.approx(expected, abs=1e-5)


def test_several_texts_of_a_prompt_differ(llama):
    settings = config(do_sample=True, num_return_sequences=4, temperature=2.0)
    texts = prompts(3)
    got = texts_of(generate_batch(llama, texts, settings, batching(), seed=3))
    assert len(got) == 12
    assert len(set(map(tuple, got))) == 12
    assert texts_of(generate_batch(llama, texts, settings, batching(), seed=3)) == got


def test_processors_before_the_fused_stages_are_called(llama):
    settings = config(do_sample=True, suppress_tokens=list(range(3, 40)), top_k=4)
    got = texts_of(generate_batch(llama, prompts(4), settings, batching(), seed=1))
    chosen = {token for text in got for token in text}
    assert chosen and not chosen & set(range(3, 40))


def test_without_a_seed_torch_decides(llama):
    settings = config(do_sample=True, temperature=1.5)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(texts_of(generate_batch(llama, prompts(4), settings, batching())))
    assert runs[0] == runs[1] != runs[2]


def test_the_model_has_its_own_attention_afterwards(llama):
    before = llama.config._attn_implementation
    generate_batch(llama, prompts(2), config(do_sample=False), batching())
    assert llama.config._attn_implementation == before
    assert getattr(llama, "_cached_continuous_batching_manager", None) is None
    with pytest.raises(ValueError, match="max_batch_tokens"):
        generate_batch(llama, prompts(2), config(do_sample=False), batching(max_batch_tokens=-1))
    assert llama.config._attn_implementation == before


def test_other_calls_refuse_the_attention_of_batches(llama):
    before = llama.config._attn_implementation
    generate_batch(llama, prompts(1), config(do_sample=False), batching())
    llama.config._attn_implementation = NAME
    try:
        with pytest.raises(ValueError, match="for continuous batching alone"):
            llama(torch.tensor([[5, 6]]))
    finally:
        llama.config._attn_implementation = before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, "seed.*-1"),
        ({"seed": [1, 2]}, "seed has 2 numbers; expected one for each of 3 prompts"),
        ({"seed": [1, -2, 3]}, r"seed\[1\]"),
        ({"persistent_manager": True}, "persistent_manager"),
    ],
)
def test_bad_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate_batch(llama, prompts(3), config(do_sample=True), batching(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"seed": -1}, ValueError, "seed"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5; expected a number from 0 to 1"),
        ({"temperature": float("nan")}, ValueError, "temperature"),
        ({"top_k": "3"}, TypeError, "top_k"),
        ({"typical_p": 0.5}, ValueError, "no 'typical_p'; expected one of seed, temperature"),
    ],
)
def test_bad_arguments_of_a_request(llama, arguments, kind, message):
    before = llama.config._attn_implementation
    manager = BatchingManager(llama, config(do_sample=True), batching())
    try:
        with pytest.raises(kind, match=message):
            manager.add_request([5], **arguments)
        assert manager.input_queue.empty()
    finally:
        llama.set_attn_implementation(before)


def test_register_makes_the_attention_of_pages_known_to_models_and_their_own_call(
    llama: Any, tmp_path: Path
) -> None:
    texts = prompts(4)
    expected = one_by_one(llama, texts, config())
    llama.save_pretrained(tmp_path)
    program = textwrap.dedent("""
        import sys
        from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig
        from lmdecode.integrations.transformers import register

        register()
        register()
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        assert model.config._attn_implementation == "sdpa"
        model.set_attn_implementation("lmdecode_flash")
        loaded = AutoModelForCausalLM.from_pretrained(
            sys.argv[1], attn_implementation="lmdecode_flash"
        )
        for model in (model, loaded):
            found = model.generate_batch(
                eval(sys.argv[2]),
                GenerationConfig(**eval(sys.argv[3])),
                ContinuousBatchingConfig(page_size=16, num_blocks=64, max_batch_tokens=64),
                progress_bar=False,
            )
            assert model.config._attn_implementation == "lmdecode_flash"
            assert all(request.error is None for request in found.values())
            print([request.generated_tokens for request in found.values()])
    """)
    settings = {
        name: getattr(config(), name)
        for name in ("max_new_tokens", "eos_token_id", "pad_token_id", "bos_token_id")
    }
    out = run_python("-c", program, tmp_path, repr(texts), repr(settings))
    assert out.stdout.splitlines() == [str(expected)] * 2


PAGE = 16


@pytest.fixture(scope="module")
def fingerprint(llama: Any) -> Fingerprint:
    return Fingerprint.from_model(llama)


def opened(path: Path, fingerprint: Fingerprint, **options: Any) -> KVStore:
    options = {"capacity_bytes": 1 << 26, "chunk_tokens": 8, **options}
    return KVStore(path, fingerprint=fingerprint, **options)


def texts(count: int, length: int = 70) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return torch.randint(3, VOCAB, (count, length), generator=generator).tolist()


CONFIG = GenerationConfig(max_new_tokens=12, eos_token_id=-1, pad_token_id=0, do_sample=False)
BATCHING = ContinuousBatchingConfig(page_size=PAGE, num_blocks=64, max_batch_tokens=64)


class Computed:
    """Counts the tokens that a model computes."""

    def __init__(self, model: Any) -> None:
        self.tokens, self._model = 0, model

    def __enter__(self) -> Computed:
        layer = self._model.model.layers[0]
        self._hook = layer.register_forward_pre_hook(self._count, with_kwargs=True)
        return self

    def _count(self, layer: Any, args: Any, kwargs: Any) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        self.tokens += states.shape[1]

    def __exit__(self, *exc: object) -> None:
        self._hook.remove()


def run(model: Any, prompts: list[list[int]], batching: Any = BATCHING, **arguments: Any) -> Any:
    with Computed(model) as computed:
        outputs = generate_batch(model, prompts, CONFIG, batching, **arguments)
    assert [output.error for output in outputs.values()] == [None] * len(prompts)
    return [output.generated_tokens for output in outputs.values()], computed.tokens


def test_prompts_are_found_after_the_store_was_closed(tmp_path, llama, fingerprint):
    expected, all_tokens = run(llama, texts(6))
    with opened(tmp_path, fingerprint) as store:
        assert run(llama, texts(6), store=store) == (expected, all_tokens)
        assert store.stats()["hits"] == 0
    with opened(tmp_path, fingerprint) as store:
        got, tokens = run(llama, texts(6), store=store)
        assert got == expected
        # 70 tokens have 4 whole blocks of 16 that need not be computed
        assert tokens == all_tokens - 6 * 4 * PAGE
        assert store.stats()["hits"] == 6


def test_a_chat_goes_on_behind_its_answer(tmp_path, llama, fingerprint):
    with opened(tmp_path, fingerprint) as store:
        (answer,), _ = run(llama, texts(1), store=store)
        chat = texts(1)[0] + answer + [5, 6, 7]
        (expected,), all_tokens = run(llama, [chat])
        (got,), tokens = run(llama, [chat], store=store)
    assert got == expected
    # 81 tokens were computed of prompt and answer: 5 whole blocks
    assert tokens == all_tokens - 5 * PAGE


def test_generate_with_store_and_batches_share_what_they_store(tmp_path, llama, fingerprint):
    (prompt,) = texts(1)
    ids = torch.tensor([prompt])
    with opened(tmp_path / "a", fingerprint) as store:
        alone = generate_with_store(llama, store, None, ids, generation_config=CONFIG)
        (got,), tokens = run(llama, [prompt], store=store)
        assert got == alone[0, len(prompt) :].tolist()
        assert tokens == len(prompt) - 4 * PAGE + CONFIG.max_new_tokens - 1
    with opened(tmp_path / "b", fingerprint) as store:
        run(llama, [prompt], store=store)
        with Computed(llama) as computed:
            again = generate_with_store(llama, store, None, ids, generation_config=CONFIG)
        assert torch.equal(again, alone)
        # 69 tokens are found: all but the last one
        assert computed.tokens == 1 + CONFIG.max_new_tokens - 1


@pytest.mark.parametrize("num_blocks", [7, 10, 20])
@pytest.mark.parametrize("max_batch_tokens", [16, 64])
def test_few_blocks(tmp_path, llama, fingerprint, num_blocks, max_batch_tokens):
    """Requests wait, and are put back: what is loaded for one may have to go for another."""
    batching = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=num_blocks, max_batch_tokens=max_batch_tokens
    )
    prompts = texts(8)
    prompts += [prompts[0][:40] + prompts[1][40:], prompts[0][:33], prompts[2]]
    expected, _ = run(llama, prompts)
    with opened(tmp_path, fingerprint) as store:
        for _ in range(2):
            assert run(llama, prompts, batching, store=store)[0] == expected
            assert run(llama, prompts[::-1], batching, store=store)[0] == expected[::-1]
        assert store.stats()["hits"] > 0


def test_several_sequences_of_a_request(tmp_path, llama, fingerprint):
    config = GenerationConfig(
        max_new_tokens=12, eos_token_id=-1, pad_token_id=0, do_sample=True, num_return_sequences=3
    )
    expected = generate_batch(llama, texts(2), config, BATCHING, seed=5)
    with opened(tmp_path, fingerprint) as store:
        for _ in range(2):
            got = generate_batch(llama, texts(2), config, BATCHING, seed=5, store=store)
            assert sorted(o.generated_tokens for o in got.values()) == sorted(
                o.generated_tokens for o in expected.values()
            )


def test_a_manager_keeps_texts_of_requests_that_come_and_go(tmp_path, llama, fingerprint):
    with opened(tmp_path, fingerprint) as store:
        manager = BatchingManager(llama, CONFIG, BATCHING, store=store)
        for _ in range(2):  # started again, the cache is the one of before
            manager.start()
            for prompt in texts(3):
                manager.add_request(prompt, max_new_tokens=4)
            gone = manager.add_request(texts(4)[3], max_new_tokens=200, streaming=True)
            assert gone is not None
            manager.get_result(request_id=gone, timeout=60)
            manager.cancel_request(gone)
            for _ in range(3):
                assert manager.get_result(timeout=60) is not None
            manager.stop(block=True)
        for prompt in texts(4):
            assert store.lookup(prompt).num_tokens == len(prompt)


def damage(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1 << 16:
            data = bytearray(file.read_bytes())
            for at in range(1 << 12, len(data), 509):
                data[at] ^= 0x55
            file.write_bytes(data)


@pytest.mark.parametrize("failure", ["damaged", "full", "readonly", "closed"])
def test_a_store_that_fails_costs_time_alone(tmp_path, llama, fingerprint, failure):
    expected, all_tokens = run(llama, texts(4))
    slots = {"capacity_bytes": 1 << 14} if failure == "full" else {}
    with opened(tmp_path, fingerprint, **slots) as store:
        run(llama, texts(4), store=store)
    if failure == "damaged":
        damage(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with opened(tmp_path, fingerprint, readonly=failure == "readonly", **slots) as store:
            if failure == "closed":
                store.close()
            got, tokens = run(llama, texts(4), store=store)
    assert got == expected
    if failure == "readonly":
        assert tokens < all_tokens
    elif failure != "full":  # which may have some of them
        assert tokens == all_tokens


def refused() -> list[Any]:
    sharing = ContinuousBatchingConfig(page_size=PAGE, allow_block_sharing=False)
    return [
        ({"store": 5}, BATCHING, "Llama", "store is int; expected a KVStore"),
        ({}, sharing, "Llama", "allow_block_sharing=False; expected True"),
        ({}, BATCHING, "Mistral", "sliding windows; expected a model without"),
    ]


@pytest.mark.parametrize(("arguments", "batching", "name", "message"), refused())
def test_what_cannot_have_a_store(tmp_path, arguments, batching, name, message):
    model = build_window_model(name)
    with opened(tmp_path, Fingerprint.from_model(model)) as store:
        arguments = {"store": store, **arguments}
        with pytest.raises((ValueError, TypeError), match=message):
            BatchingManager(model, CONFIG, batching, **arguments)


def test_a_store_of_another_model(tmp_path, llama):
    other = copy.deepcopy(llama)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    with (
        opened(tmp_path, Fingerprint.from_model(other)) as store,
        pytest.raises(FingerprintMismatchError),
    ):
        generate_batch(llama, texts(1), CONFIG, BATCHING, store=store)


GREEDY: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 15},
    {"min_length": 40},
    {"bad_words_ids": [[5], [24, 28]]},
    {"begin_suppress_tokens": [24, 32]},
    {"forced_eos_token_id": 2},
    {"forced_bos_token_id": 9},
    {"exponential_decay_length_penalty": (3, 1.5)},
    {"sequence_bias": [[[24, 28], -5.0], [[7], 3.0]]},
    {"encoder_repetition_penalty": 1.5},
    {"encoder_no_repeat_ngram_size": 2},
    {"max_length": 45, "max_new_tokens": None},
    {"length_penalty": 2.0, "num_beams": 1, "guidance_scale": 1.0},
]
DRAWN: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4, "temperature": 0.7, "top_k": 9},
    {"typical_p": 0.7},
    {"top_p": 0.8, "typical_p": 0.9, "min_new_tokens": 15},
    {"epsilon_cutoff": 0.02, "no_repeat_ngram_size": 2},
    {"top_h": 0.5, "renormalize_logits": True},
]
END = 28  # which the model writes soon


def settings_of(arguments: dict[str, Any], **others: Any) -> GenerationConfig:
    settings = config(**{"top_k": 0} if others.get("do_sample") else {}, **others)
    settings.update(eos_token_id=END)
    settings.update(**arguments)
    return settings


@pytest.mark.parametrize("do_sample", [False, True])
def test_texts_are_those_of_generate_with_each_option(llama: Any, do_sample: bool) -> None:
    """Also in the company of others, and of requests that are put back and computed again."""
    texts = prompts(4)
    seeds = list(range(len(texts))) if do_sample else None
    plain = one_by_one(llama, texts, settings_of({}, do_sample=do_sample), seeds)
    changed = 0
    for arguments in DRAWN if do_sample else GREEDY:
        settings = settings_of(arguments, do_sample=do_sample)
        expected = one_by_one(llama, texts, settings, seeds)
        before = copy.deepcopy(settings)
        for company in (batching(), batching(num_blocks=7, max_batch_tokens=16)):
            got = texts_of(generate_batch(llama, texts, settings, company, seed=seeds))
            assert got == expected, arguments
        assert settings.to_dict() == before.to_dict(), "the caller's own"
        changed += expected != plain
    assert changed >= len(DRAWN if do_sample else GREEDY) - 2


def test_end_tokens_of_a_request_are_those_of_its_processors(llama: Any) -> None:
    settings = settings_of({"min_new_tokens": 12, "repetition_penalty": 1.2}, do_sample=False)
    manager = BatchingManager(llama, settings, batching())
    manager.start()
    try:
        texts, ends = prompts(2), [END, 24]
        for text, end in zip(texts, ends, strict=True):
            manager.add_request(text, f"ends {end}", eos_token_id=end)
        found = [manager.get_result(timeout=60) for _ in texts]
    finally:
        manager.stop(block=True)
    got = {output.request_id: output.generated_tokens for output in found if output is not None}
    for text, end in zip(texts, ends, strict=True):
        settings.update(eos_token_id=end)
        assert [got[f"ends {end}"]] == one_by_one(llama, [text], settings)


def test_several_texts_of_a_prompt_have_the_processors(llama: Any) -> None:
    settings = settings_of({"no_repeat_ngram_size": 1, "num_return_sequences": 3}, do_sample=True)
    got = texts_of(generate_batch(llama, prompts(2), settings, batching(), seed=3))
    assert len(got) == 6 and len(set(map(tuple, got))) == 6
    assert all(len(set(text)) == len(text) for text in got)


def test_options_may_be_arguments(llama: Any) -> None:
    texts = prompts(3)
    given = {"repetition_penalty": 1.7, "max_new_tokens": 7}
    got = generate_batch(llama, texts, config(do_sample=False), batching(), **given)
    expected = one_by_one(llama, texts, settings_of({"eos_token_id": 2, **given}, do_sample=False))
    assert texts_of(got) == expected


@pytest.mark.parametrize("name", options.REFUSED)
def test_what_a_request_cannot_have_is_refused(llama: Any, name: str) -> None:
    before = llama.config._attn_implementation
    settings = config(do_sample=False)
    setattr(settings, name, 2)
    for call in (generate_batch, lambda *given: BatchingManager(given[0], *given[2:])):
        with pytest.raises(ValueError, match=f"{name} is 2; expected none"):
            call(llama, prompts(1), settings, batching())
        assert llama.config._attn_implementation == before


def test_every_option_of_transformers_is_known() -> None:
    """An option of a later release is refused where it is set, until it is in one of the lists."""
    kinds = [options.OF_REQUESTS, options.OF_PROCESSORS, options.WITHOUT_EFFECT, {*options.REFUSED}]
    known: set[str] = set().union(*kinds)
    assert sum(map(len, kinds)) == len(known)
    assert {name for name in vars(GenerationConfig()) if name not in known} == set()

    class LaterConfig(GenerationConfig):
        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.option_to_come = given.get("option_to_come")

    options.checked_config("call", LaterConfig(attribute_of_a_checkpoint=0.5))
    with pytest.raises(ValueError, match="option_to_come is True; expected none"):
        options.checked_config("call", LaterConfig(option_to_come=True))


@pytest.mark.parametrize(
    ("texts", "arguments", "error", "message"),
    [
        ([[5], []], {}, ValueError, "a prompt is empty"),
        ([[5, 6]], {"max_length": 2, "max_new_tokens": None}, ValueError,
         "max_length less 2 .* is 0"),
        ([[5]], {"logits_processor": []}, TypeError, "logits_processor is given, which is no argu"),
        ([[5]], {"new_tokens": 3}, TypeError, "new_tokens is given"),
        ([[5], [10**6]], {}, RuntimeError, "of 2 requests failed, the first with req_.*index out"),
        ([[5] * 2000], {}, RuntimeError, "1 of 1 requests failed, the first with req_0: No reques"),
    ],
)  # fmt: skip
def test_an_error_is_no_empty_list(
    llama: Any, texts: list[list[int]], arguments: dict[str, Any], error: Any, message: str
) -> None:
    before = llama.config._attn_implementation
    with pytest.raises(error, match=message):
        generate_batch(llama, texts, config(do_sample=False), batching(), **arguments)
    assert llama.config._attn_implementation == before
    assert texts_of(generate_batch(llama, [], config(do_sample=False), batching())) == []


def test_a_processor_that_fails_is_an_error(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    def fail(*_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no scores today")

    monkeypatch.setattr(RepetitionPenaltyLogitsProcessor, "__call__", fail)
    settings = settings_of({"repetition_penalty": 1.7}, do_sample=False)
    with pytest.raises(RuntimeError, match=r"2 of 2 requests failed.*no scores today"):
        generate_batch(llama, prompts(2), settings, batching())
