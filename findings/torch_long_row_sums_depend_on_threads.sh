#!/usr/bin/env bash
# torch 2.13.0, on the CPU: the sum of one long row depends on threads, and differs from a batch's.
#
# sum(-1), mean(-1) and F.rms_norm of [1, 40000] cut the row between threads and add up the parts.
# Of [32, 40000] each row is one thread's. So with two threads or more a row has other bits alone
# than in a batch, and alone other bits than with one thread. Rows of up to 32,768 elements are
# not cut.
# softmax, log_softmax and layer_norm take a row as a whole: they have no such problem.
#
# Seen: with two threads 22 of 32 rows have another sum alone than in the batch, with one none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0
"$folder/venv/bin/python" -W ignore - <<'PY'
import torch
import torch.nn.functional as F

torch.manual_seed(0)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
cut = {
    "sum": lambda x: x.sum(-1, keepdim=True), "mean": lambda x: x.mean(-1, keepdim=True),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[1:]),
}
whole = {
    "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[1:]),
}
for size in (32_768, 40_000):
    x = torch.randn(32, size)
    for name, op in (cut | whole).items():
        rows, batches = {}, {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            rows[threads] = torch.cat([op(row[None]) for row in x])
            batches[threads] = op(x)
        alone = int((rows[2] != batches[2]).any(1).sum())
        by_threads = int((rows[2] != rows[1]).any(1).sum())
        print(f"{size:,} {name:>11}: of 32 rows {alone} differ alone, {by_threads} by threads")
        assert torch.equal(rows[1], batches[1]) and torch.equal(batches[1], batches[2])
        cuts = name in cut and size > 32_768
        assert (alone > 0 and by_threads > 0) if cuts else alone == by_threads == 0
PY
echo "as it was found"
