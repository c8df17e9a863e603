"""Corpora of any size: text files that are tokenized once, and read from disk in mixtures."""

from transformer.config._lazy import lazy_exports

_EXPORTS = {"_dataset": ("Corpus", "CorpusDataset")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
