"""Imports of ``lmdecode.integrations.ray`` for tests that need no Ray."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[3]
KJV = str(ROOT / "examples/kjv_mistral/model")
G2P = str(ROOT / "examples/g2p/model")

if importlib.util.find_spec("ray") is None:
    sys.modules["ray"] = ModuleType("ray")
    try:
        import lmdecode.integrations.ray  # noqa: F401
    finally:
        del sys.modules["ray"]  # so that pytest.importorskip finds none
