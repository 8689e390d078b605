#!/usr/bin/env bash
# transformers 5.23.0: generate(custom_generate=function) drops `streamer`, `tokenizer` and `synced_gpus`.
#
# A function given as custom_generate takes the place of the decoding loop. It is called with the
# logits processors and the stopping criteria. `streamer`, `tokenizer` and `synced_gpus`, which the
# caller gave too, do not reach it. Nothing warns: the streamer gets the prompt, no token, no end.
#
# Seen: of these five arguments the first three are missing, and the streamer got three tokens.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
config = LlamaConfig(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
)
model = LlamaForCausalLM(config)


class Streamer:
    def __init__(self):
        self.calls = []

    def put(self, tokens):
        self.calls.append(tokens.numel())

    def end(self):
        self.calls.append("end")


def loop(model, input_ids, **given):
    seen.update(given)
    return input_ids


seen, streamer = {}, Streamer()
model.generate(
    torch.tensor([[1, 2, 3]]), custom_generate=loop, streamer=streamer, tokenizer=object(),
    synced_gpus=False,
)  # fmt: skip
print("transformers", transformers.__version__)
names = ("streamer", "tokenizer", "synced_gpus", "logits_processor", "stopping_criteria")
found = {name: seen.get(name) is not None for name in names}
print(found, "the streamer got", streamer.calls)
assert found == {
    "streamer": False, "tokenizer": False, "synced_gpus": False, "logits_processor": True,
    "stopping_criteria": True,
}  # fmt: skip
assert streamer.calls == [3]
PY
echo "as it was found"
