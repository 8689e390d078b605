"""Beam search over the best log-probabilities, with a stand-in of vLLM's engine."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lmdecode import BeamRequest, BeamResult, BeamSearch
from lmdecode.integrations.vllm import beam_search

VOCAB, END = 40, 3


class Engine:
    """As ``vllm.LLM``: the logits of a text follow from its last two tokens."""

    def __init__(self, max_logprobs: int = -1, logprobs_mode: str = "raw_logprobs") -> None:
        self.table = torch.randn(
            VOCAB, VOCAB, VOCAB, generator=torch.Generator().manual_seed(0), dtype=torch.float64
        )
        config = SimpleNamespace(
            max_logprobs=max_logprobs, logprobs_mode=logprobs_mode, max_model_len=64,
            get_vocab_size=lambda: VOCAB,
        )  # fmt: skip
        self.llm_engine = SimpleNamespace(vllm_config=SimpleNamespace(model_config=config))
        self.asked: list[int] = []

    def get_tokenizer(self) -> Any:
        return lambda text: SimpleNamespace(input_ids=[ord(c) % VOCAB for c in text])

    def logits(self, text: list[int]) -> torch.Tensor:
        return self.table[text[-2] if len(text) > 1 else 0, text[-1]]

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[Any]:
        assert params.max_tokens == 1 and not use_tqdm
        self.asked.append(params.logprobs)
        outputs = []
        for prompt in prompts:
            logprobs = self.logits(prompt["prompt_token_ids"]).log_softmax(-1)
            best = logprobs.topk(params.logprobs).indices.tolist()
            step = {token: SimpleNamespace(logprob=logprobs[token].item()) for token in best}
            outputs.append(SimpleNamespace(outputs=[SimpleNamespace(logprobs=[step])]))
        return outputs


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> Engine:
    module: Any = ModuleType("vllm")
    module.SamplingParams = SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    return Engine()


def by_all_logits(llm: Engine, prompts: list[list[int]], **arguments: Any) -> list[BeamResult]:
    engine = BeamSearch()
    for place, prompt in enumerate(prompts):
        engine.insert(BeamRequest(prompt, request_id=place, **arguments))
    results = {}
    while engine.num_rows:
        ids, lengths = engine.input_ids()
        texts = [row[:n] for row, n in zip(ids.tolist(), lengths.tolist(), strict=True)]
        engine.step(torch.stack([llm.logits(text) for text in texts]).float())
        results.update({result.request_id: result for result in engine.pop_finished()})
    return [results[place] for place in range(len(prompts))]


PROMPTS = [[5, 7], [9], [4, 4, 4, 8, 1], [30, 2]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"num_beams": 4},
        {"num_beams": 1, "eos_token_id": END},
        {"num_beams": 5, "num_return_sequences": 5, "eos_token_id": [END, 7]},
        {"num_beams": 4, "eos_token_id": END, "length_penalty": 2.0, "early_stopping": True},
        {"num_beams": 4, "eos_token_id": END, "length_penalty": -1.0, "early_stopping": "never"},
        {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.5, "eos_token_id": END},
        {"num_beams": 3, "eos_token_id": END, "min_new_tokens": 6},
        {"num_beams": 3, "suppress_tokens": list(range(20)), "eos_token_id": END},
        {"num_beams": 3, "repetition_penalty": 5.0},
        {"num_beams": 3, "no_repeat_ngram_size": 1},
        {"num_beams": 3, "forced_eos_token_id": END, "eos_token_id": END},
        {"num_beams": 4, "eos_token_id": END, "dialect": "fairseq"},
    ],
    ids=str,
)
def test_it_is_the_search_over_all_logits(arguments: dict[str, Any], llm: Engine) -> None:
    found = beam_search(llm, PROMPTS, max_new_tokens=9, **arguments)
    expected = by_all_logits(llm, PROMPTS, max_new_tokens=9, **arguments)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.scores, theirs.scores, rtol=0, atol=1e-5)
        assert ours.status == theirs.status == 0


def test_it_asks_for_few_log_probabilities(llm: Engine) -> None:
    beam_search(llm, PROMPTS, num_beams=4, max_new_tokens=5, eos_token_id=END)
    assert llm.asked == [9] * 5


def test_the_end_token_is_the_tokenizers(llm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in vLLM's own ``LLM.beam_search``; None is no end token."""
    search = {"num_beams": 3, "max_new_tokens": 9}
    ended = beam_search(llm, PROMPTS, eos_token_id=END, **search)
    endless = beam_search(llm, PROMPTS, eos_token_id=None, **search)
    monkeypatch.setattr(llm, "get_tokenizer", lambda: SimpleNamespace(eos_token_id=END))
    for arguments, expected in (({}, ended), ({"eos_token_id": None}, endless)):
        found = beam_search(llm, PROMPTS, **arguments, **search)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert any(
        a.lengths.tolist() != b.lengths.tolist() for a, b in zip(ended, endless, strict=True)
    )


def test_texts_are_tokenized(llm: Engine) -> None:
    (found,) = beam_search(llm, ["ab"], num_beams=2, max_new_tokens=3)
    (expected,) = beam_search(llm, [[97 % VOCAB, 98 % VOCAB]], num_beams=2, max_new_tokens=3)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logit_bias": {1: 2.0}}, "logit_bias was given"),
        ({"coverage_penalty": 0.1}, "coverage_penalty was given"),
        ({"trie": None}, "trie was given"),
        ({"repetition_penalty": 0.9}, "repetition_penalty is 0.9; expected at least 1"),
        ({"diversity_penalty": -1.0, "num_beam_groups": 2}, "diversity_penalty is -1.0; expected"),
        ({"max_new_tokens": 63}, r"prompts\[0\] and max_new_tokens have 65 tokens; expected at mo"),
        ({"num_beams": 0}, "num_beams is 0"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], message: str, llm: Engine) -> None:
    with pytest.raises(ValueError, match=message):
        beam_search(llm, [[5, 7]], **{"max_new_tokens": 5} | arguments)
    assert llm.asked == []


def test_engines_that_do_not_suffice(llm: Engine) -> None:
    needed = "9 log-probabilities a beam are needed; max_logprobs of the engine is 8"
    with pytest.raises(ValueError, match=needed):
        beam_search(Engine(max_logprobs=8), [[5]], num_beams=4, max_new_tokens=5)
    beam_search(Engine(max_logprobs=9), [[5]], num_beams=4, max_new_tokens=5)
    with pytest.raises(ValueError, match="logprobs_mode of the engine is 'processed_logprobs'"):
        beam_search(Engine(logprobs_mode="processed_logprobs"), [[5]], max_new_tokens=5)
    with pytest.raises(TypeError, match="prompts is of type str"):
        beam_search(llm, "text", max_new_tokens=5)
