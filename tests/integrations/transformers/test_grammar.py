"""``GrammarLogitsProcessor``: by ``sample``, by stock ``generate()``, and by hand."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmdecode.integrations.transformers import GrammarLogitsProcessor, sample
from lmdecode.integrations.transformers.sampling import loop

xgrammar = pytest.importorskip("xgrammar", reason="the extra grammar is not installed")

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples" / "kjv_mistral" / "model"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def bible():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def compiler(tokenizer, bible):
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=bible.config.vocab_size)
    return xgrammar.GrammarCompiler(info)


@pytest.fixture(scope="module")
def grammar(compiler):
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
        },
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    return compiler.compile_json_schema(json.dumps(schema), any_whitespace=False)


@pytest.fixture(scope="module")
def inputs(tokenizer):
    return tokenizer(
        ["And God said, ", "Behold, "], return_tensors="pt", padding=True, padding_side="left"
    )


def test_greedy_text_is_that_of_stock_generate(bible, tokenizer, grammar, inputs):
    options = {"max_new_tokens": 40, "do_sample": False, "repetition_penalty": 1.2}
    expected = bible.generate(
        **inputs, **options, logits_processor=[GrammarLogitsProcessor(grammar)]
    )
    got = bible.generate(
        **inputs,
        **options,
        logits_processor=[GrammarLogitsProcessor(grammar)],
        custom_generate=sample,
    )
    assert torch.equal(got, expected)
    for text in tokenizer.batch_decode(
        got[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
    ):
        assert set(json.loads(text)) == {"name", "age"}


def test_strings_have_no_special_tokens_by_the_recipe(bible):
    """Of a model with two end tokens; xgrammar 0.2.9 alone allows one of them in a string."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # Words that become special: the second end token, and another.
    end, other = tokenizer.convert_ids_to_tokens([2000, 2001])
    tokenizer.add_special_tokens({"extra_special_tokens": [end, other]})
    ends = [bible.generation_config.eos_token_id, 2000]
    added = tokenizer.added_tokens_decoder.items()
    others = [id for id, token in added if token.special and id not in ends]
    bias = {(id,): 50.0 for id in (2000, 2001)}
    texts = []
    for options, given in (({"stop_token_ids": ends}, others), ({}, None)):
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=bible.config.vocab_size, **options
        )
        grammar = xgrammar.GrammarCompiler(info).compile_json_schema('{"type": "string"}')
        ids = bible.generate(
            **tokenizer("And God said, ", return_tensors="pt"), max_new_tokens=4, eos_token_id=ends,
            suppress_tokens=given, sequence_bias=bias, custom_generate=sample, do_sample=False,
            logits_processor=[GrammarLogitsProcessor(grammar)],
        )  # fmt: skip
        texts.append(bool({2000, 2001} & set(ids[0, -3:].tolist())))
    assert texts == [False, True]


def test_sample_masks_no_logits_in_memory(bible, tokenizer, grammar, inputs, monkeypatch):
    """The mask goes to the op; the text is that of a processor that is called."""
    options = {"max_new_tokens": 60, "do_sample": True, "top_k": 40, "seed": [1, 2]}

    def run() -> torch.Tensor:
        return bible.generate(
            **inputs,
            **options,
            logits_processor=[GrammarLogitsProcessor(grammar)],
            custom_generate=sample,
        )

    def fail(*_):
        raise AssertionError("called")

    with monkeypatch.context() as patch:
        patch.setattr(GrammarLogitsProcessor, "__call__", fail)
        fused = run()
    fusion = loop.fuse_sampling
    plain = lambda processors, sampled, rows: fusion(processors, sampled)  # noqa: E731
    monkeypatch.setattr(loop, "fuse_sampling", plain)
    assert torch.equal(run(), fused)


def test_a_processor_serves_one_text_after_another(bible, tokenizer, grammar, inputs):
    processor = GrammarLogitsProcessor(grammar)
    options = {"max_new_tokens": 40, "do_sample": False, "custom_generate": sample}
    first = bible.generate(**inputs, **options, logits_processor=[processor])
    again = bible.generate(**inputs, **options, logits_processor=[processor])
    assert torch.equal(first, again)


def test_the_mask_is_that_of_the_matcher(bible, tokenizer, compiler, grammar):
    vocab = bible.config.vocab_size
    words = compiler.compile_regex("yes|no")
    processor = GrammarLogitsProcessor([grammar, words])
    ids = torch.tensor([[1], [1]])
    scores = processor(ids, torch.zeros(2, vocab))
    texts = [
        {tokenizer.decode([token]) for token in (row > -1).nonzero()[:, 0].tolist()}
        for row in scores
    ]
    assert texts[1] <= {"yes", "y", "ye", "no", "n"}
    assert texts[1] >= {"y", "n"}
    assert all(text.startswith("{") for text in texts[0])
    assert torch.equal(processor(ids, torch.zeros(2, vocab)), scores)
    brace, letter = (tokenizer.encode(t, add_special_tokens=False)[-1] for t in ("{", "n"))
    after = processor(torch.tensor([[1, brace], [1, letter]]), torch.zeros(2, vocab))
    allowed = {tokenizer.decode([token]) for token in (after[1] > -1).nonzero()[:, 0].tolist()}
    assert allowed == {"o"}
    # Logits behind the grammar's vocabulary are forbidden.
    wider = GrammarLogitsProcessor(words)(ids, torch.zeros(2, vocab + 40))
    assert torch.equal(wider[:, :vocab], scores[1].expand(2, -1))
    assert (wider[:, vocab:] == -torch.inf).all()


def test_what_is_no_grammar_is_refused(grammar):
    with pytest.raises(TypeError, match=r"grammar\[0\] is of type str"):
        GrammarLogitsProcessor("root ::= x")
    processor = GrammarLogitsProcessor([grammar, grammar])
    with pytest.raises(ValueError, match="one for each of 3 rows; got 2"):
        processor.bitmask(torch.zeros(3, 4, dtype=torch.int64))


@pytest.mark.slow
def test_two_hundred_documents_parse():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "valid_json.py", "--count", "200"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "200 documents, all valid JSON" in done.stdout
