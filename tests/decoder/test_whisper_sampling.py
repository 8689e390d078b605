"""Sampling from encoder-decoder models, and Whisper's fallback to other temperatures."""

import copy
from typing import Any

import pytest
import torch

from tests.decoder.decoder_models import make_inputs, pair
from tests.decoder.whisper_models import long_audio, short_audio, whisper_pair

KINDS = ["marian", "t5", "whisper"]
STAGES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "top_k": 7},
    {"top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 4},
    {"temperature": 1.5, "typical_p": 0.7, "no_repeat_ngram_size": 2},
]


@pytest.mark.parametrize(
    ("kind", "stages"),
    [
        pytest.param(kind, stages, id=f"{kind}-{'+'.join(stages) or 'none'}")
        for kind in KINDS
        for stages in STAGES
        if kind != "whisper" or "temperature" in stages  # without one Whisper draws nothing
    ],
)
def test_probabilities_are_those_of_generate(kind: str, stages: dict[str, Any]) -> None:
    """Of the first step; further ones are behind tokens that were drawn."""
    model, decoding = pair(kind)
    arguments: dict[str, Any] = {
        **make_inputs(kind), "do_sample": True, "max_new_tokens": 6, "output_scores": True,
        "return_dict_in_generate": True, "eos_token_id": None, **stages,
    }  # fmt: skip
    if kind == "whisper":
        arguments.pop("eos_token_id")
    torch.manual_seed(0)
    first = decoding.generate(**arguments)
    torch.manual_seed(0)
    again = decoding.generate(**arguments)
    other = decoding.generate(**arguments, seed=5)
    assert again["sequences"].equal(first["sequences"])
    assert not other["sequences"].equal(first["sequences"])
    assert other["sequences"].equal(decoding.generate(**arguments, seed=5)["sequences"])
    expected = model.generate(**arguments)
    ours, theirs = first["scores"][0], expected["scores"][0]
    assert (ours > -torch.inf).equal(theirs > -torch.inf)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), atol=1e-4, rtol=1e-3)


def test_draws_have_the_distribution() -> None:
    """Pearson's test, of the first token of 3000 texts."""
    model, decoding = whisper_pair(0)
    count = 3000
    features = short_audio(1)["input_features"]
    arguments: dict[str, Any] = dict(
        input_features=features,
        language="en",
        return_timestamps=True,
        temperature=1.3,
        top_k=6,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    scores = model.generate(**arguments)["segments"][0][0]["result"]["scores"][0]
    probabilities = scores.softmax(-1)
    torch.manual_seed(3)
    arguments.update(return_dict_in_generate=False, output_scores=False)
    tokens = decoding.generate(**arguments, do_sample=True, num_return_sequences=count)[:, 0]
    allowed = (probabilities > 0).nonzero()[:, 0]
    drawn = torch.stack([(tokens == token).sum() for token in allowed]).double()
    assert int(drawn.sum()) == count and len(allowed) == 6
    wanted = probabilities[allowed].double() * count
    assert float(((drawn - wanted) ** 2 / wanted).sum()) < 25.7  # p = 1e-4, 5 degrees of freedom


def test_padding_of_the_prompt_does_not_change_the_noise() -> None:
    _, decoding = whisper_pair(1)
    arguments: dict[str, Any] = dict(
        language="en", condition_on_prev_tokens=True, temperature=0.4, seed=4
    )
    both = long_audio(4.2, 6.1, seed=1)
    torch.manual_seed(0)
    first = decoding.generate(**both, **arguments)
    assert decoding.generate(**both, **arguments).equal(first)


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": 0.9}, {"temperature": (0.0, 0.4, 0.9), "logprob_threshold": -0.5}, {}],
    ids=["one temperature", "fallback", "greedy"],
)
def test_seeds_are_those_of_the_sounds(arguments: dict[str, Any]) -> None:
    """Of whichever are not yet at their end, or drawn again."""
    _, decoding = whisper_pair(1)
    sounds, seeds = long_audio(4.1, 6.2, 3.5, seed=1), [7, 2**62, 0]
    arguments = {"language": "en", **arguments}
    together = decoding.generate(**sounds, **arguments, seed=seeds).tolist()
    pad = decoding.model.generation_config.pad_token_id
    for row, seed in enumerate(seeds):
        frames = int(sounds["attention_mask"][row].sum())  # transformers reads no mask of one sound
        alone = sounds["input_features"][row : row + 1, :, :frames]
        text = decoding.generate(alone, **arguments, seed=torch.tensor([seed]))[0].tolist()
        assert together[row] == text + [pad] * (len(together[row]) - len(text))
    for wrong in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=r"^seed: expected one number, or one for each of 3 r"):
            decoding.generate(**sounds, **arguments, seed=wrong)


def test_a_seed_beside_beams_is_for_what_is_drawn_again() -> None:
    _, decoding = whisper_pair(1)
    arguments: dict[str, Any] = dict(
        **long_audio(4.1, 3.2, seed=1), language="en", num_beams=3, temperature=(0.0, 0.8),
        logprob_threshold=-0.5,
    )  # fmt: skip
    one, two, other = (decoding.generate(**arguments, seed=seed).tolist() for seed in (5, 5, 6))
    assert one == two != other


@pytest.mark.parametrize("num_beams", [1, 3])
def test_fallback(num_beams: int) -> None:
    """Windows that are good enough greedily are those of transformers; others are drawn again."""
    seed = 1
    model, decoding = whisper_pair(seed)
    arguments: dict[str, Any] = dict(
        **long_audio(4.1, 3.2, seed=seed),
        language="en",
        num_beams=num_beams,
        return_segments=True,
        condition_on_prev_tokens=True,
    )
    good = dict(temperature=(0.0, 0.4), compression_ratio_threshold=9.0, logprob_threshold=-99.0)
    expected = model.generate(**arguments, **good)
    got = decoding.generate(**arguments, **good)
    assert got["sequences"].tolist() == expected["sequences"].tolist()
    bad = dict(temperature=(0.0, 0.2, 0.8), logprob_threshold=-0.5)
    texts = []
    for _ in range(2):
        torch.manual_seed(seed)
        texts.append(decoding.generate(**arguments, **bad)["sequences"])
    assert texts[0].equal(texts[1])
    torch.manual_seed(seed + 7)
    assert decoding.generate(**arguments, **bad)["sequences"].tolist() != texts[0].tolist()
    assert texts[0].tolist() != expected["sequences"].tolist()


def test_a_low_temperature_is_greedy() -> None:
    """So whole texts of the fallback are compared with those of transformers."""
    model, decoding = whisper_pair(0)
    arguments: dict[str, Any] = dict(
        **long_audio(5.3, 4.2), language="en", temperature=(0.0, 1e-4), logprob_threshold=0.0
    )
    expected = model.generate(**arguments)
    assert decoding.generate(**arguments).tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["marian", "t5"])
def test_beams_that_are_drawn(kind: str) -> None:
    """With torch's own noise, so the tokens are those of transformers."""
    model, decoding = pair(kind)
    memory = model.get_encoder()(**make_inputs(kind))
    arguments: dict[str, Any] = dict(
        attention_mask=make_inputs(kind)["attention_mask"],
        do_sample=True,
        num_beams=3,
        max_new_tokens=10,
        temperature=0.9,
    )
    torch.manual_seed(1)
    expected = model.generate(encoder_outputs=copy.copy(memory), **arguments)
    torch.manual_seed(1)
    assert decoding.generate(encoder_outputs=memory, **arguments).tolist() == expected.tolist()


def test_ended_rows_are_padded() -> None:
    _, decoding = pair("marian")
    torch.manual_seed(0)
    tokens = decoding.generate(
        **make_inputs("marian"), do_sample=True, num_return_sequences=4, max_new_tokens=20,
        eos_token_id=[2, 20, 21, 22], pad_token_id=10**9,
    )  # fmt: skip
    assert tokens.shape[0] == 12 and (tokens == 10**9).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2, "seed": 3}, "^seed: expected None with beams"),
        ({"seed": [1, 2]}, "^seed: expected one number, or one for each of 3"),
        ({"seed": -1}, "^seed: expected an int >= 0, got -1"),
        ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
         "^do_sample: expected F"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_drawn(arguments: dict[str, Any], message: str) -> None:
    _, decoding = pair("marian")
    with pytest.raises(ValueError, match=message):
        decoding.generate(**make_inputs("marian"), do_sample=True, max_new_tokens=4, **arguments)
