"""Tokenizers: vocabularies learned from texts, tokenizers of pretrained models, and their files."""

from transformer.config._lazy import lazy_exports

_EXPORTS = {"_base": ("Tokenizer",), "_kinds": ("load_tokenizer",)}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
