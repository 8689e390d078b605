"""Beam searches that come and go in one batch, with the KV cache of a transformers model.

Each prompt runs through the model once, by itself; then its beams join the batch of all rows, whose
cache is padded on the left. After each step one ``index_select`` by ``parents`` widens new prompts
to beams, lets beams follow their parents and drops the rows of requests that are finished.

    python examples/beam_search_batching.py [--check]
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch.nn.functional import pad
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from lmdecode import BeamRequest, BeamSearch

MODEL = Path(__file__).resolve().parent / "kjv_mistral" / "model"
# The step before which a request arrives, its prompt, its beams.
ARRIVALS = [
    (0, "Genesis 1\nIn the beginning", 4),
    (0, "Psalm 23\nThe LORD is my", 2),
    (3, "Proverbs 10\nA wise son", 5),
    (9, "Matthew 5\nBlessed are the", 3),
]


class Batch:
    """KV cache and attention mask [rows, length] of all beams; shorter rows begin with zeros."""

    def __init__(self) -> None:
        self.cache = DynamicCache()
        self.mask = torch.zeros(0, 0, dtype=torch.int64)

    def run(self, model: AutoModelForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
        """Give each row its next token [rows]; return the logits [rows, V] that follow."""
        self.mask = pad(self.mask, (0, 1), value=1)
        return model(
            input_ids=tokens[:, None],
            attention_mask=self.mask,
            position_ids=self.mask.sum(1, keepdim=True) - 1,
            past_key_values=self.cache,
        ).logits[:, -1]

    def join(self, prompt: DynamicCache) -> None:
        """Add the row of a prompt that the model has read."""
        have, length = self.mask.shape[1], prompt.get_seq_length()
        if not len(self.mask):
            self.cache, self.mask = prompt, torch.ones(1, length, dtype=torch.int64)
            return
        old, new = max(length - have, 0), max(have - length, 0)  # zeros that each lacks
        for mine, theirs in zip(self.cache.layers, prompt.layers, strict=True):
            for name in ("keys", "values"):
                parts = (getattr(mine, name), getattr(theirs, name))
                padded = [pad(p, (0, 0, n, 0)) for p, n in zip(parts, (old, new), strict=True)]
                setattr(mine, name, torch.cat(padded))
        row = pad(torch.ones(1, length, dtype=torch.int64), (new, 0))
        self.mask = torch.cat((pad(self.mask, (old, 0)), row))

    def follow(self, parents: torch.Tensor) -> None:
        """Make row r what row parents[r] was, and drop what nobody needs any more."""
        self.mask = self.mask.index_select(0, parents)
        first = int(self.mask.any(0).int().argmax()) if len(parents) else self.mask.shape[1]
        self.mask = self.mask[:, first:]
        for layer in self.cache.layers:
            layer.keys = layer.keys.index_select(0, parents)[:, :, first:]
            layer.values = layer.values.index_select(0, parents)[:, :, first:]


@torch.no_grad()
def main() -> None:
    """Run all requests, and print their best texts as they finish."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with generate(), one by one")
    check = parser.parse_args().check
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    # In float32 a row hardly depends on its batch; in bfloat16 rounding decides between beams.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    engine, batch, waiting, requests = BeamSearch(model.config.vocab_size), Batch(), [*ARRIVALS], {}
    step, tokens = 0, torch.zeros(0, dtype=torch.int64)
    while waiting or engine.num_rows:
        logits = [batch.run(model, tokens)] if len(tokens) else []
        while waiting and waiting[0][0] <= step:
            _, text, num_beams = waiting.pop(0)
            prompt = tokenizer(text, return_tensors="pt").input_ids
            request = BeamRequest(
                prompt[0], max_new_tokens=24, num_beams=num_beams, early_stopping=True,
                eos_token_id=[model.config.eos_token_id, *tokenizer(".").input_ids[-1:]],
            )  # fmt: skip
            requests[engine.insert(request)] = request
            cache = DynamicCache()
            logits.append(model(input_ids=prompt, past_key_values=cache).logits[:, -1])
            batch.join(cache)
        out = engine.step(torch.cat(logits))
        batch.follow(out.parents)
        tokens, step = out.tokens, step + 1
        for result in engine.pop_finished():
            print(f"step {step:2d}, {engine.num_rows:2d} rows left, request {result.request_id}:")
            print(f"  {float(result.scores[0]):.4f} {tokenizer.decode(result.sequences[0])!r}")
            if check:
                request = requests[result.request_id]
                alone = model.generate(
                    torch.tensor([request.prompt_ids]), max_new_tokens=24, early_stopping=True,
                    num_beams=request.num_beams, eos_token_id=list(request.eos_token_id),
                    pad_token_id=request.pad_token, do_sample=False,
                )  # fmt: skip
                same = torch.equal(alone, result.sequences)
                print(f"  {'equal to' if same else 'DIFFERENT FROM'} generate()")


if __name__ == "__main__":
    main()
