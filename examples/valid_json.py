"""JSON of a schema from the shipped language model, which has never seen any.

xgrammar says after each token which tokens keep the text valid. ``GrammarLogitsProcessor`` hands
that to the op that samples, as a mask of bits. The program generates documents, each by a seed of
its own, parses all, and prints the first.

    python examples/valid_json.py [--count 200]

Needs ``pip install "lmdecode[transformers,grammar]"``.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

try:
    import xgrammar
except ImportError:
    raise SystemExit('valid_json: xgrammar is missing: pip install ".[grammar]"') from None

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmdecode.integrations.transformers import GrammarLogitsProcessor, sample

MODEL = Path(__file__).resolve().parent / "kjv_mistral" / "model"
TEXT = {"type": "string", "maxLength": 24}
SCHEMA = {
    "type": "object",
    "properties": {
        "book": {"enum": ["Genesis", "Psalms", "Matthew", "Revelation"]},
        "chapter": {"type": "integer", "minimum": 1, "maximum": 150},
        "verses": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
        "speaker": {"anyOf": [TEXT, {"type": "null"}]},
        "spoken": {"type": "boolean"},
    },
    "required": ["book", "chapter", "verses", "speaker", "spoken"],
    "additionalProperties": False,
}
BATCH = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--count", type=int, default=4, help="documents to generate")
    count = parser.parse_args().count
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    # Without these xgrammar takes special tokens for text, within strings.
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    added = tokenizer.added_tokens_decoder.items()
    others = [token for token, of in added if of.special and token not in ends]
    info = xgrammar.TokenizerInfo.from_huggingface(
        tokenizer, vocab_size=model.config.vocab_size, stop_token_ids=ends
    )
    grammar = xgrammar.GrammarCompiler(info).compile_json_schema(
        json.dumps(SCHEMA), any_whitespace=False
    )
    prompt = tokenizer("And God said, ", return_tensors="pt")
    length = prompt["input_ids"].shape[1]

    documents = []
    for first in range(0, count, BATCH):
        seeds = range(first, min(first + BATCH, count))
        ids = model.generate(
            **prompt,
            do_sample=True,
            temperature=0.9,
            top_k=50,
            repetition_penalty=1.1,
            num_return_sequences=len(seeds),
            max_new_tokens=200,
            suppress_tokens=others or None,
            logits_processor=[GrammarLogitsProcessor(grammar)],
            custom_generate=sample,
            seed=list(seeds),
        )
        texts = tokenizer.batch_decode(ids[:, length:], skip_special_tokens=True)
        documents += [json.loads(text) for text in texts]
    assert all(set(document) == set(SCHEMA["required"]) for document in documents)
    for document in documents[:4]:
        print(json.dumps(document, ensure_ascii=False))
    print(f"{len(documents)} documents, all valid JSON with the keys of the schema")


if __name__ == "__main__":
    main()
