"""Folders of CTranslate2: ``model.bin``, ``config.json`` and vocabularies, as they are.

``lmdecode.Decoding.from_pretrained`` takes such a folder. This package also has its tokenizers.
"""

from lmdecode.readers.ctranslate2.folder import Source, is_ctranslate2, load_vocabulary, open_folder
from lmdecode.readers.ctranslate2.model_file import ModelFile, Variable
from lmdecode.readers.ctranslate2.tokenizer import load_feature_extractor, load_tokenizer

__all__ = [
    "ModelFile", "Source", "Variable", "is_ctranslate2", "load_feature_extractor",
    "load_tokenizer", "load_vocabulary", "open_folder",
]  # fmt: skip
