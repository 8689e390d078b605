"""A process with an engine of vLLM: it reads a job from its input and writes what came of it.

The job is JSON: "engine", arguments of ``vllm.LLM``; "batches", lists of requests, each a prompt
(tokens) and arguments of ``SamplingParams``, which run one batch after the other; "is_async",
whether by ``AsyncLLM``, in processes of its own; "searches", prompts
and arguments of ``beam_search``. The last line of the output is JSON.
"""

import asyncio
import json
import sys
from typing import Any


def outcome(output: Any) -> dict[str, Any]:
    """What a test compares of a request: its tokens, and log-probabilities by token."""
    (sequence,) = output.outputs
    logprobs = sequence.logprobs and [
        {str(token): one.logprob for token, one in step.items()} for step in sequence.logprobs
    ]
    return {
        "tokens": list(sequence.token_ids),
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
    }


def run(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    from vllm import LLM, SamplingParams

    llm = LLM(**job["engine"])
    results = []
    for batch in job["batches"]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in batch]
        params = [SamplingParams(**request["params"]) for request in batch]
        results.append([outcome(o) for o in llm.generate(prompts, params, use_tqdm=False)])
    for search in job.get("searches", ()):
        from lmdecode.integrations.vllm import beam_search

        found = beam_search(llm, search["prompts"], **search["arguments"])
        results.append(
            [{"sequences": f.sequences.tolist(), "scores": f.scores.tolist()} for f in found]
        )
    return results


async def run_async(job: dict[str, Any]) -> list[list[dict[str, Any]]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**job["engine"]))

    async def one(name: str, request: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY, **request["params"])
        async for output in engine.generate(
            {"prompt_token_ids": request["prompt"]}, params, request_id=name
        ):
            last = output
        return outcome(last)

    results = []
    try:
        for i, batch in enumerate(job["batches"]):
            running = (one(f"{i}-{j}", request) for j, request in enumerate(batch))
            results.append(await asyncio.gather(*running))
    finally:
        engine.shutdown()
    return results


def main() -> None:
    job = json.load(sys.stdin)
    if transfer := job["engine"].get("kv_transfer_config"):
        from vllm.config import KVTransferConfig

        job["engine"]["kv_transfer_config"] = KVTransferConfig(**transfer)
    if job.get("is_async"):
        results = asyncio.run(run_async(job))
    else:
        results = run(job)
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

    report = {
        "batches": results,
        "sampler": TopKTopPSampler.forward_cpu.__module__,
        "has_lmdecode": "lmdecode" in sys.modules,
    }
    sys.stdout.flush()
    print("\n" + json.dumps(report))


if __name__ == "__main__":  # processes of the engine import this file, too
    main()
