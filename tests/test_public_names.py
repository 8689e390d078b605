"""The public names of lmdecode, so that none is renamed or lost unnoticed, and what they need."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lmdecode

NAMES = """
BeamCandidates BeamFinal BeamHypotheses BeamIndirection BeamParameters BeamRequest BeamResult
BeamSearch BeamSearchScorer BeamState BeamStep BeamTrace BlockSlots BlockTable CausalBatch
CausalConfig CausalLayerWeights CausalWeights ConstrainedBeamSearchScorer Constraint
ConstraintListState DIALECTS DecoderConfig DecoderLayer DecoderWeights Decoding DecodingBatch
DisjunctiveConstraint Engine EngineStats Grammar KVStore KeptSet LayerWeights OutOfBlocksError
PackedLinear PhrasalConstraint Request RequestResult RequestStats RingKVCache RingSnapshot RowTokens
SampleOutput Sampler SamplerOutput Session StepOutput TokenLogprob Trie VerifyOutput beam_finalize
beam_parameters beam_step compressed_swa_mask copy_blocks_ cpu_capability expand_compressed_swa_mask
format_trace gather_indirect gather_tree has_cuda layer_norm log_softmax_top_k
merge_attention_states new_beam_state prompt_lookup reorder_cache_ ring_cache_append_ rms_norm
sliding_window_attention sliding_window_decode swa_mask top_k_top_p_sample update_beam_indirection_
verify_draft
""".split()


def test_public_names() -> None:
    assert sorted(lmdecode.__all__) == sorted(NAMES)
    assert set(NAMES) <= set(dir(lmdecode))
    for name in NAMES:
        assert getattr(lmdecode, name) is not None
    assert not hasattr(lmdecode, "Sampler0")


def test_the_store_is_lmdecode_stores() -> None:
    store = importlib.import_module("lmdecode.store")
    assert lmdecode.KVStore is store.KVStore
    assert lmdecode.Session is store.Session


def run(code: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, from a folder that holds nothing else."""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )


def test_lmdecode_does_not_need_the_store(tmp_path: Path) -> None:
    code = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.startswith("lmdecode.store"):
            raise ImportError("the store's own error")

sys.meta_path.insert(0, Hidden())
import lmdecode
assert not any(name.startswith("lmdecode.store") for name in sys.modules)
assert {"KVStore", "Session"} <= set(dir(lmdecode)) & set(lmdecode.__all__)
for name in ("KVStore", "Session"):
    try:
        getattr(lmdecode, name)
    except ImportError as error:
        print(error)
"""
    done = run(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the store's own error"] * 2


HIDE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)

sys.meta_path.insert(0, Hidden())
{code}
"""
CALLS = [
    ("transformers", "transformers", "import lmdecode.integrations.transformers"),
    (
        "transformers",
        "transformers",
        "import lmdecode; lmdecode.Decoding.from_pretrained('a-folder')",
    ),
    (
        "redis",
        "redis",
        "from lmdecode.store import Remote; Remote(url='redis://localhost').connector()",
    ),
    (
        "matplotlib",
        "demo",
        "from lmdecode.demo._output import require; require('matplotlib')",
    ),
]


@pytest.mark.parametrize(("package", "extra", "code"), CALLS, ids=lambda value: value[:60])
@pytest.mark.slow
def test_what_is_missing_names_its_extra(
    package: str, extra: str, code: str, tmp_path: Path
) -> None:
    """In words that work with the source folder, too."""
    done = run(HIDE.format(package=package, code=code), tmp_path)
    assert done.returncode == 1
    message = done.stderr.splitlines()[-1]
    assert package in message
    assert f"pip install 'lmdecode[{extra}]'" in message
    assert f"in its source folder pip install '.[{extra}]'" in message
