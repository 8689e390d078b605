#!/usr/bin/env bash
# transformers 5.23.0: top_k keeps more than k tokens where logits tie, so top_k=1 is not greedy.
#
# The warper removes what is less than the k-th largest value, and all its equals stay. Logits in
# bfloat16 have 8 bits of precision: ties at the top are common with a vocabulary of 100,000. With
# do_sample=True and top_k=1 each of the tied tokens is drawn; greedy search always takes the first.
#
# Seen: of logits with three equal best, top_k=1 keeps three, and draws take all of them.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check transformers==5.23.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import transformers
from transformers import LogitsProcessorList, TopKLogitsWarper

logits = torch.tensor([[1.0, 4.0, 2.0, 4.0, 4.0]], dtype=torch.bfloat16).float()
kept = LogitsProcessorList([TopKLogitsWarper(1)])(torch.tensor([[0]]), logits)
torch.manual_seed(0)
drawn = torch.multinomial(kept.softmax(-1), 200, replacement=True).unique().tolist()
print("transformers", transformers.__version__)
print("kept:", kept.isfinite().nonzero()[:, 1].tolist(), "drawn:", drawn)
assert kept.isfinite().sum() == 3 and drawn == [1, 3, 4]
PY
echo "as it was found"
