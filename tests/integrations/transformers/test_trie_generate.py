"""``generate()`` held to a ``Trie``: transformers' own with its ``prefix_allowed_tokens_fn``."""

import random
from typing import Any

import pytest
import torch
from beam_parity import lowest_index_first

from lmdecode import BeamRequest, BeamSearch, Decoding, PhrasalConstraint, Trie
from lmdecode.beam.trie import PrefixTokens
from lmdecode.beam.types import REAL_BEAM_SCORE_BOUND
from lmdecode.integrations.transformers import beam_search, sample
from tests.support.beam_searches import TableModel, as_transformers_model, run_requests
from tests.support.tiny_models import BEAM_MODELS, EOS, build_model

VOCAB = 611
FIRST = 3  # token that is no special one


def catalogue(seed: int, count: int = 20000, longest: int = 3) -> Trie:
    choice = random.Random(seed)
    return Trie(
        [*(choice.randrange(FIRST, VOCAB) for _ in range(choice.randint(1, longest))), EOS]
        for _ in range(count)
    )


def inputs_of(model: Any, batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(FIRST, VOCAB, (batch, 5), generator=generator)
    mask = torch.ones_like(ids)
    if not model.config.is_encoder_decoder:
        mask[0, :2] = 0  # padding of the prompt is no part of an item
    return {"input_ids": ids, "attention_mask": mask}


def prompt_length_of(model: Any, inputs: dict[str, torch.Tensor]) -> int:
    return 1 if model.config.is_encoder_decoder else inputs["input_ids"].shape[1]


def new_tokens(sequence: torch.Tensor, prompt: int) -> list[int]:
    tokens = sequence[prompt:].tolist()
    return tokens[: tokens.index(EOS) + 1] if EOS in tokens else tokens


def check(
    model: Any, trie: Trie, width: int, batch: int = 2, *, whole_items: bool = True, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare tokens and scores of results that are real in transformers; return ours."""
    inputs = inputs_of(model, batch)
    prompt = prompt_length_of(model, inputs)
    arguments = {
        "do_sample": False, "max_new_tokens": 6, "num_beams": width, "eos_token_id": EOS,
        "num_return_sequences": min(width, 60), "return_dict_in_generate": True, **more,
    }  # fmt: skip
    with torch.no_grad():
        with lowest_index_first():
            expected = model.generate(
                **inputs, **arguments, output_scores=True,
                prefix_allowed_tokens_fn=trie.after(prompt),
            )  # fmt: skip
        ours = {**arguments, "prefix_allowed_tokens_fn": trie, "custom_generate": beam_search}
        fused = model.generate(**inputs, **ours)
        whole = model.generate(**inputs, **ours, output_scores=True)  # by rows of log-probabilities
    count, scores, compared = len(expected.sequences) // batch, whole.sequences_scores, 0
    for row, score in enumerate(expected.sequences_scores.tolist()):
        if score <= REAL_BEAM_SCORE_BOUND:  # a copy, or a search that went on behind an end
            assert count > len(trie) or not whole_items
            continue
        want = new_tokens(expected.sequences[row], prompt)
        for got in (fused, whole):
            assert new_tokens(got.sequences[row], prompt) == want, (row, score)
        torch.testing.assert_close(scores[row].item(), score, rtol=1e-5, atol=1e-5)
        assert want in trie or not whole_items
        compared += 1
    assert compared
    return fused.sequences, scores


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("width", [4, 50, 400, 512])
def test_widths(width: int, early_stopping: bool | str) -> None:
    model = build_model("gpt2", VOCAB, torch.float32)
    for seed in range(2):
        check(model, catalogue(seed), width, early_stopping=early_stopping)


@pytest.mark.parametrize("name", BEAM_MODELS)
def test_models(name: str) -> None:
    model = build_model(name, VOCAB, torch.float32)
    for width, penalty in ((2, 0.0), (7, 1.0), (33, 2.0)):
        check(model, catalogue(width), width, length_penalty=penalty)


@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 1},
        {"min_new_tokens": 3},
        {"suppress_tokens": [5, 9, 77]},
        {"sequence_bias": {(8,): 4.0, (90,): -2.0}},
        {"bad_words_ids": [[12], [13]]},
        {"eos_token_id": [EOS, 40, 41]},
        {"forced_eos_token_id": EOS, "max_new_tokens": 3},
        {"num_return_sequences": 1},
        {"max_new_tokens": 2},
    ],
    ids=str,
)
def test_with_other_processors(more: dict[str, Any]) -> None:
    check(build_model("gpt2", VOCAB, torch.float32), catalogue(1), 9, whole_items=False, **more)


@pytest.mark.parametrize("early_stopping", [False, "never"])
def test_fewer_items_than_beams(early_stopping: bool | str) -> None:
    """All items, each once; transformers adds copies and what goes on behind an end."""
    model = build_model("gpt2", VOCAB, torch.float32)
    for count in (1, 3, 20):
        trie = catalogue(count, count)
        sequences, scores = check(model, trie, 40, early_stopping=early_stopping)
        for rows, of_rows in zip(sequences.view(2, 40, -1), scores.view(2, 40), strict=True):
            found = [new_tokens(row, 5) for row in rows[: len(trie)]]
            assert sorted(found) == list(trie)
            assert bool((of_rows[len(trie) :] <= REAL_BEAM_SCORE_BOUND).all())


def test_the_same_function_for_transformers() -> None:
    model, trie = build_model("gpt2", VOCAB, torch.float32), catalogue(3)
    inputs = inputs_of(model)
    arguments = {"do_sample": False, "max_new_tokens": 6, "num_beams": 5, "eos_token_id": EOS}
    found = [
        model.generate(**inputs, **arguments, prefix_allowed_tokens_fn=allowed, **more).tolist()
        for allowed, more in (
            (trie.after(5), {}),
            (trie.after(5), {"custom_generate": beam_search}),
            (trie, {"custom_generate": beam_search}),
        )
    ]
    assert found[0] == found[1] == found[2]
    with pytest.raises(TypeError, match=r"trie.after\(prompt_length\)"):
        model.generate(**inputs, **arguments, prefix_allowed_tokens_fn=trie)


def test_what_is_refused() -> None:
    model, trie = build_model("gpt2", VOCAB, torch.float32), catalogue(3)
    arguments: dict[str, Any] = {
        **inputs_of(model), "max_new_tokens": 4, "num_beams": 4, "prefix_allowed_tokens_fn": trie,
        "custom_generate": beam_search,
    }  # fmt: skip
    with pytest.raises(ValueError, match="constraints, force_words_ids: expected none"):
        model.generate(**arguments, constraints=[PhrasalConstraint([5])])
    arguments["prefix_allowed_tokens_fn"] = Trie([[VOCAB]])
    groups = {"num_beam_groups": 2, "diversity_penalty": 1.0}
    for more in ({}, groups, {"do_sample": True}, {"custom_generate": sample, "num_beams": 1}):
        with pytest.raises(ValueError, match=f"trie has the token {VOCAB}; expected tokens below"):
            model.generate(**{**arguments, **more})


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_beam_sampling(name: str) -> None:
    """transformers draws the same from the same state of the generator."""
    model, trie = build_model(name, VOCAB, torch.float32), catalogue(4)
    inputs = inputs_of(model)
    prompt = prompt_length_of(model, inputs)
    arguments = {"do_sample": True, "max_new_tokens": 6, "num_beams": 4, "eos_token_id": EOS,
                 "num_return_sequences": 2, "top_k": 0}  # fmt: skip
    decoding = None if name == "gpt2" else Decoding.from_pretrained(model)
    for seed in range(5):
        torch.manual_seed(seed)
        expected = model.generate(
            **inputs, **arguments, prefix_allowed_tokens_fn=trie.after(prompt)
        )
        torch.manual_seed(seed)
        got = model.generate(
            **inputs, **arguments, prefix_allowed_tokens_fn=trie, custom_generate=beam_search
        )
        assert got.tolist() == expected.tolist()
        assert all(new_tokens(row, prompt) in trie for row in got)
        if decoding is not None:
            torch.manual_seed(seed)
            again = decoding.generate(**inputs, **arguments, prefix_allowed_tokens_fn=trie)
            assert again.tolist() == expected.tolist()


def test_beam_sampling_of_few_items() -> None:
    model = build_model("gpt2", VOCAB, torch.float32)
    for seed, count in enumerate((1, 3, 8)):
        trie = catalogue(count, count)
        torch.manual_seed(seed)
        found = model.generate(
            **inputs_of(model), do_sample=True, max_new_tokens=6, num_beams=5, eos_token_id=EOS,
            num_return_sequences=5, prefix_allowed_tokens_fn=trie, custom_generate=beam_search,
            return_dict_in_generate=True, output_scores=True, top_k=0,
        )  # fmt: skip
        real = found.sequences_scores > REAL_BEAM_SCORE_BOUND
        items = [new_tokens(row, 5) for row in found.sequences[real]]
        assert items and all(item in trie for item in items)


@pytest.mark.parametrize("name", ["gpt2", "bart"])
@pytest.mark.parametrize("is_greedy", [False, True])
def test_sample(name: str, is_greedy: bool) -> None:
    """What the trie bans has no chance, as with a function; and the bitmask changes no token."""
    model, trie = build_model(name, VOCAB, torch.float32), catalogue(4)
    inputs = inputs_of(model)
    prompt = prompt_length_of(model, inputs)
    arguments = {"do_sample": not is_greedy, "max_new_tokens": 6, "eos_token_id": EOS,
                 "custom_generate": sample}  # fmt: skip
    if not is_greedy:
        arguments |= {"top_k": 9, "temperature": 3.0}
    after = trie.after(prompt)
    for seed in range(4):
        more = {} if is_greedy else {"seed": seed}
        expected = model.generate(
            **inputs, **arguments, **more,
            prefix_allowed_tokens_fn=lambda batch, ids: after(batch, ids),  # no trie to be seen
        )  # fmt: skip
        got = model.generate(**inputs, **arguments, **more, prefix_allowed_tokens_fn=trie)
        assert got.tolist() == expected.tolist()
        assert all(new_tokens(row, prompt) in trie for row in got)
        both = model.generate(
            **inputs, **arguments, **more, prefix_allowed_tokens_fn=trie, repetition_penalty=1.2
        )
        assert all(new_tokens(row, prompt) in trie for row in both)
    if is_greedy:
        arguments.pop("custom_generate")
        theirs = model.generate(**inputs, **arguments, prefix_allowed_tokens_fn=after)
        assert got.tolist() == theirs.tolist()


def test_sample_reads_the_bitmask(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor, which makes a list of the allowed tokens, is not called."""
    model, trie = build_model("gpt2", VOCAB, torch.float32), catalogue(4)
    monkeypatch.setattr(PrefixTokens, "__call__", None)
    found = model.generate(
        **inputs_of(model), do_sample=True, max_new_tokens=6, eos_token_id=EOS, seed=3,
        custom_generate=sample, prefix_allowed_tokens_fn=trie,
    )  # fmt: skip
    assert all(new_tokens(row, 5) in trie for row in found)


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_groups(name: str) -> None:
    """As with a function that allows the same tokens."""
    model, trie = build_model(name, VOCAB, torch.float32), catalogue(5)
    inputs = inputs_of(model)
    prompt = prompt_length_of(model, inputs)
    after = trie.after(prompt)
    arguments = {"do_sample": False, "max_new_tokens": 6, "num_beams": 6, "eos_token_id": EOS,
                 "num_return_sequences": 6, "num_beam_groups": 3, "diversity_penalty": 0.7,
                 "return_dict_in_generate": True, "output_scores": True}  # fmt: skip
    expected = model.generate(
        **inputs, **arguments, custom_generate=beam_search,
        prefix_allowed_tokens_fn=lambda batch, ids: after(batch, ids),
    )  # fmt: skip
    found = [
        model.generate(
            **inputs, **arguments, custom_generate=beam_search, prefix_allowed_tokens_fn=trie
        )
    ]
    without_scores = {**arguments, "return_dict_in_generate": False, "output_scores": False}
    plain = model.generate(
        **inputs, **without_scores, custom_generate=beam_search, prefix_allowed_tokens_fn=trie
    )
    assert plain.tolist() == expected.sequences.tolist()
    if name == "t5":
        decoding = Decoding.from_pretrained(model)
        found.append(decoding.generate(**inputs, **arguments, prefix_allowed_tokens_fn=trie))
    for got in found:
        assert got.sequences.tolist() == expected.sequences.tolist()
        torch.testing.assert_close(
            got.sequences_scores, expected.sequences_scores, rtol=1e-4, atol=1e-4
        )
        real = got.sequences_scores > REAL_BEAM_SCORE_BOUND
        assert bool(real.any())
        assert all(new_tokens(row, prompt) in trie for row in got.sequences[real])


@pytest.mark.parametrize("width", [4, 50])
def test_a_request_equals_generate(width: int) -> None:
    """``BeamSearch`` against transformers on the same logits, in one batch."""
    table = TableModel(VOCAB, seed=5)
    model, trie = as_transformers_model(table), catalogue(6)
    prompts = [[5, 6], [9, 8, 7], [11]]
    requests = [
        BeamRequest(prompt, max_new_tokens=5, num_beams=width, num_return_sequences=width,
                    eos_token_id=EOS, trie=trie) for prompt in prompts
    ]  # fmt: skip
    results = run_requests(BeamSearch(), table, [(number, r) for number, r in enumerate(requests)])
    for number, prompt in enumerate(prompts):
        with torch.no_grad(), lowest_index_first():
            expected = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=5,
                num_beams=width, num_return_sequences=width, eos_token_id=EOS, pad_token_id=EOS,
                do_sample=False, prefix_allowed_tokens_fn=trie.after(len(prompt)),
                return_dict_in_generate=True, output_scores=True,
            )  # fmt: skip
        got = results[number]
        wanted = [new_tokens(row, len(prompt)) for row in expected.sequences]
        assert [got.new_tokens(rank) for rank in range(width)] == wanted
        torch.testing.assert_close(
            got.scores.float(), expected.sequences_scores, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("width", [1, 4, 50])
@pytest.mark.parametrize("name", ["llama", "bart", "t5"])
def test_decoding(name: str, width: int) -> None:
    model, trie = build_model(name, VOCAB, torch.float32), catalogue(8)
    inputs = inputs_of(model)
    prompt, decoding = prompt_length_of(model, inputs), Decoding.from_pretrained(model)
    arguments = {"do_sample": False, "max_new_tokens": 6, "num_beams": width,
                 "num_return_sequences": width, "eos_token_id": EOS}  # fmt: skip
    with torch.no_grad(), lowest_index_first():
        expected = model.generate(
            **inputs, **arguments, prefix_allowed_tokens_fn=trie.after(prompt)
        )
        scored = model.generate(
            **inputs, **arguments, prefix_allowed_tokens_fn=trie.after(prompt),
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
    arguments["prefix_allowed_tokens_fn"] = trie
    got = decoding.generate(**inputs, **arguments)
    assert got.tolist() == expected.tolist()
    assert all(new_tokens(row, prompt) in trie for row in got)
    again = decoding.generate(
        **inputs, **arguments, return_dict_in_generate=True, output_scores=True
    )
    assert again.sequences.tolist() == expected.tolist()
    if width > 1:
        torch.testing.assert_close(
            again.sequences_scores, scored.sequences_scores, rtol=1e-4, atol=1e-4
        )
    # The first step's scores: what the trie bans is -inf there too.
    torch.testing.assert_close(again.scores[0], scored.scores[0], rtol=1e-4, atol=1e-4)


def test_groups_of_few_items() -> None:
    """Results of a real score are items, with nothing left to go on to, too."""
    model = build_model("gpt2", VOCAB, torch.float32)
    for count in (1, 8):
        trie = catalogue(count, count)
        found = model.generate(
            **inputs_of(model), do_sample=False, max_new_tokens=6, num_beams=6, eos_token_id=EOS,
            num_return_sequences=6, num_beam_groups=3, diversity_penalty=0.7,
            prefix_allowed_tokens_fn=trie, custom_generate=beam_search,
            return_dict_in_generate=True, output_scores=True, early_stopping=True,
        )  # fmt: skip
        real = found.sequences_scores > REAL_BEAM_SCORE_BOUND
        items = [new_tokens(row, 5) for row in found.sequences[real]]
        assert len(items) >= 6 and all(item in trie for item in items)
