"""Modules that ``import lmdecode`` does not load are attributes of it nevertheless."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "name",
    ["store.KVStore", "reference.swa_mask", "compat.ascend.top_k_top_p_sample",
     "compat.faster_transformer.decoding", "formats.gguf.load_tokenizer"],
)  # fmt: skip
@pytest.mark.slow
def test_modules_are_loaded_when_they_are_asked_for(name: str) -> None:
    module = "lmdecode." + name.rsplit(".", 1)[0]
    program = (
        f"import sys, lmdecode; assert {module!r} not in sys.modules; "
        f"print(lmdecode.{name}.__name__); "
        "assert not hasattr(lmdecode, 'stores') and not hasattr(lmdecode.compat, 'stores')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == name.rsplit(".", 1)[1]
