"""Tests against transformers 4.38.2, whose beam search scorers and constraints ours mirror.

transformers 5 no longer has these classes, and the two versions cannot be installed together. So
these tests run in an environment of their own, which `make test` sets up, and elsewhere there is
nothing to collect. The run in that environment fails if it collects nothing.
"""

import importlib.metadata

import torch

torch.set_num_threads(1)  # tensors are tiny here

if importlib.metadata.version("transformers") != "4.38.2":
    collect_ignore_glob = ["test_*.py"]
