"""Folders of CTranslate2: their variables, configs and vocabularies."""
