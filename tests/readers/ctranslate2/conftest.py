"""Where the tests of CTranslate2's folders have them converted, each once."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ctranslate2")
