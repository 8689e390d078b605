"""Prints how many tokens of a model's logits each stage of a ``Sampler`` keeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

import lmdecode
from lmdecode.demo._output import aligned_table
from lmdecode.sampling import STAGES

__all__ = ["explain"]

PARAMETERS: dict[str, Any] = {
    "temperature": 0.8,
    "top_k": 200,
    "top_p": 0.98,
    "min_p": 0.005,
    "top_n_sigma": 3.0,
    "epsilon_cutoff": 0.01,
    "typical_p": 0.95,
}
REPETITION_PENALTY = 1.1
_SHOWN = 8  # of the tokens that are drawn from


def explain(logits: Tensor, text: list[int], decode: Callable[[list[int]], str], seed: int) -> None:
    """Choose the token behind a text, and print what each stage left, and what was chosen.

    Parameters
    ----------
    logits
        [vocab] behind the text.
    text
        Its tokens.
    decode
        Tokens to text.
    seed
        Of the draw.
    """
    vocab = len(logits)
    sampler = lmdecode.Sampler(
        1, vocab, repetition_penalty=REPETITION_PENALTY, num_logprobs=0, return_stages=True,
        return_kept_set=True, seed=seed, **PARAMETERS,
    )  # fmt: skip
    sampler.insert(0, prompt=text)
    out = sampler.sample(logits[None])
    assert out.stage_counts is not None and out.kept_set is not None
    assert out.rank is not None and out.logprob is not None
    counts = dict(zip(STAGES, out.stage_counts[0].tolist(), strict=True))
    rows = [["logits", "", str(vocab)]]
    rows += [
        [name, f"{PARAMETERS[name]:g}", str(counts[name])] for name in STAGES if counts[name] >= 0
    ]
    print(aligned_table(["stage", "parameter", "tokens left"], rows))

    chosen = int(out.index[0])
    ids, probabilities = out.kept_set.ids.tolist(), out.kept_set.logprobs.exp().tolist()
    shares = sorted(zip(probabilities, ids, strict=True), reverse=True)
    print("\nDrawn from:\n")
    print(
        aligned_table(
            ["token", "probability"],
            [[repr(decode([token])), f"{share:.3f}"] for share, token in shares[:_SHOWN]],
        )
    )
    if len(shares) > _SHOWN:
        print(f"... and {len(shares) - _SHOWN} more.")
    share = dict(zip(ids, probabilities, strict=True))[chosen]
    print(
        f"\nChosen: {decode([chosen])!r}, probability {share:.3f} of these, "
        f"{out.logprob.exp().item():.3f} of all, rank {out.rank.item()}."
    )
