"""Run ``generate()`` of transformers 4.38.2 in its own environment: ``python FILE IN OUT``."""

import sys

import torch
import transformers
from transformers import LogitsProcessor, LogitsProcessorList


class ForbidTokens(LogitsProcessor):
    """A processor that no library knows."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.tokens] = -float("inf")
        return scores


def main() -> None:
    transformers.logging.set_verbosity_error()
    results, models = [], {}
    for case in torch.load(sys.argv[1]):
        model_class, config_class, config = case["model"]
        if model_class not in models:
            model = getattr(transformers, model_class)(
                getattr(transformers, config_class)(**config)
            )
            missing = model.load_state_dict(case["state"], strict=False).missing_keys
            assert not missing, missing
            models[model_class] = model.eval()
        arguments = dict(case["arguments"])
        forbidden = arguments.pop("forbidden", None)
        if forbidden:
            arguments["logits_processor"] = LogitsProcessorList([ForbidTokens(forbidden)])
        with torch.no_grad():
            out = models[model_class].generate(
                **case["inputs"], **arguments, do_sample=False, return_dict_in_generate=True
            )
        results.append(
            {
                "sequences": out.sequences,
                "sequences_scores": out.sequences_scores,
                "scores": out.scores,
            }
        )
    torch.save(results, sys.argv[2])


if __name__ == "__main__":
    main()
