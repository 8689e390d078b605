"""transformers' continuous batching with and without lmdecode, calls of both in turns.

``python -m benchmarks.transformers_batch`` takes the shipped model, and a small Llama of random
weights that has the vocabulary of Llama 3. Stock is ``model.generate_batch`` with the attention
that transformers takes by itself.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

from lmdecode.integrations.transformers import generate_batch

SHIPPED = Path(__file__).resolve().parents[1] / "examples/kjv_mistral/model"


def models() -> dict[str, Any]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128256, hidden_size=256, intermediate_size=1024, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4,
    )  # fmt: skip
    return {
        "shipped": AutoModelForCausalLM.from_pretrained(SHIPPED, dtype=torch.float32).eval(),
        "Llama, V = 128,256": LlamaForCausalLM(config).eval(),
    }


def prompts_of(model: Any, count: int) -> list[list[int]]:
    torch.manual_seed(1)
    high = min(model.config.vocab_size, 1000)
    return [torch.randint(3, high, (4 + (7 * i) % 29,)).tolist() for i in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
    print(f"threads {options.threads}, {options.tokens} tokens, medians of {options.rounds} turns")
    print("| model | requests | search | stock, tokens/s | lmdecode, tokens/s | ratio |")
    print("|---|---|---|---|---|---|")
    batching = ContinuousBatchingConfig(num_blocks=256, max_batch_tokens=256)
    searches: dict[str, dict[str, Any]] = {
        "greedy": {"do_sample": False},
        "top-k 50, top-p 0.9": {"do_sample": True, "top_k": 50, "top_p": 0.9},
        "top-p 0.9": {"do_sample": True, "top_k": 0, "top_p": 0.9},
    }
    for name, model in models().items():
        for count in (1, 16, 64):
            prompts = prompts_of(model, count)
            for search, arguments in searches.items():
                config = GenerationConfig(
                    max_new_tokens=options.tokens, eos_token_id=-1, pad_token_id=0, **arguments
                )

                def stock(prompts: Any = prompts, config: Any = config, model: Any = model) -> Any:
                    return model.generate_batch(prompts, config, batching, progress_bar=False)

                def ours(prompts: Any = prompts, config: Any = config, model: Any = model) -> Any:
                    return generate_batch(
                        model, prompts, config, batching, seed=1, progress_bar=False
                    )

                times: dict[Any, list[float]] = {stock: [], ours: []}
                for _ in range(options.rounds + 1):  # the first one warms up
                    for call, taken in times.items():
                        start = time.perf_counter()
                        found = call()
                        taken.append(time.perf_counter() - start)
                        lengths = [len(each.generated_tokens) for each in found.values()]
                        assert lengths == [options.tokens] * count
                rates = [
                    count * options.tokens / statistics.median(taken[1:])
                    for taken in times.values()
                ]
                print(
                    f"| {name} | {count} | {search} | {rates[0]:.0f} | {rates[1]:.0f} "
                    f"| {rates[1] / rates[0]:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
