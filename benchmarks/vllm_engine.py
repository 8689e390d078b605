"""vLLM on a CPU with and without lmdecode: ``python -m benchmarks.vllm_engine``, where vLLM is.

Every figure comes from processes of their own, stock and with lmdecode in turns. The sampler is
timed on a small Llama with the vocabulary of Llama 3 and random weights, the connector on the
shipped model.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

MODEL = Path(__file__).resolve().parents[1] / "examples/kjv_mistral/model"
BATCHES = (1, 16, 64)
PROMPT, ANSWER, LONG = 16, 8, 4000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


def engine(**options: Any) -> Any:
    from vllm import LLM

    return LLM(dtype="float32", enforce_eager=True, disable_log_stats=True, **options)


def generate(llm: Any, prompts: list[list[int]], **params: Any) -> float:
    """Seconds of a call."""
    from vllm import SamplingParams

    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    seeded = params.pop("seeded", False)
    all_params = [
        SamplingParams(ignore_eos=True, detokenize=False, seed=i if seeded else None, **params)
        for i in range(len(prompts))
    ]
    start = time.perf_counter()
    llm.generate(inputs, all_params, use_tqdm=False)
    return time.perf_counter() - start


def time_sampler(folder: str) -> dict[str, float]:
    """Tokens a second of a batch, with top-p, by its name."""
    llm = engine(
        model=folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=256,
        max_num_seqs=64, enable_prefix_caching=False,
    )  # fmt: skip
    rates = {}
    for batch in BATCHES:
        prompts = [[(7 * i + j) % 1000 + 3 for j in range(PROMPT)] for i in range(batch)]
        for name, params in (
            ("greedy", {"temperature": 0.0}),
            ("top-p", {"top_p": 0.9}),
            ("top-p, seeds", {"top_p": 0.9, "seeded": True}),
        ):
            calls = [generate(llm, prompts, max_tokens=ANSWER, **params) for _ in range(3)]
            rates[f"{name}, batch {batch}"] = batch * ANSWER / min(calls[1:])
    return rates


def time_first_token(store: str) -> dict[str, float]:
    """Seconds to the first token of a long prompt, in a process that has not seen it."""
    options: dict[str, Any] = {}
    if store:
        options["kv_transfer_config"] = {
            "kv_connector": "LmdecodeConnector",
            "kv_connector_module_path": "lmdecode.integrations.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"path": store, "capacity_bytes": 1 << 30},
        }
        from vllm.config import KVTransferConfig

        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    llm = engine(model=str(MODEL), max_model_len=4096, block_size=32, **options)
    generate(llm, [[5] * 600], max_tokens=1, temperature=0.0)
    prompt = [(i * i) % 4000 + 3 for i in range(LONG)]
    return {"first token": generate(llm, [prompt], max_tokens=1, temperature=0.0)}


def measured(work: str, argument: str, **environment: str) -> dict[str, float]:
    """What a process of its own measured."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.vllm_engine", "--work", work, argument],
        env={**os.environ, **ENVIRONMENT, **environment}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.vllm_engine", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="processes of each kind")
    parser.add_argument("--work", choices=["sampler", "first_token"], help=argparse.SUPPRESS)
    parser.add_argument("argument", nargs="?", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work = time_sampler if arguments.work == "sampler" else time_first_token
        print("\n" + json.dumps(work(arguments.argument)))
        return
    with tempfile.TemporaryDirectory() as folder:
        llama, store = Path(folder) / "llama", Path(folder) / "store"
        llama.mkdir()
        (llama / "config.json").write_text(json.dumps(LLAMA))
        measured("first_token", str(store))  # fills the store
        runs: dict[str, list[dict[str, float]]] = {"stock": [], "lmdecode": []}
        for _ in range(arguments.rounds):
            stock = measured("sampler", str(llama), LMDECODE_VLLM_SAMPLER="0")
            runs["stock"].append(stock | measured("first_token", ""))
            ours = measured("sampler", str(llama))
            runs["lmdecode"].append(ours | measured("first_token", str(store)))
    stock, ours = medians(runs["stock"]), medians(runs["lmdecode"])
    print("| vLLM, on a CPU | stock | with lmdecode | ratio |\n|---|---|---|---|")
    for name in stock:
        if name == "first token":
            ratio, unit, scale = stock[name] / ours[name], "ms", 1e3
        else:
            ratio, unit, scale = ours[name] / stock[name], "tokens/s", 1.0
        print(
            f"| {name} | {stock[name] * scale:.0f} {unit} | {ours[name] * scale:.0f} {unit} "
            f"| {ratio:.2f}x |"
        )


if __name__ == "__main__":
    main()
