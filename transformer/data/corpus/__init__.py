"""Corpora of any size: text files that are tokenized once, and read from disk in mixtures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.data.corpus._dataset import *  # noqa: F403

_EXPORTS = {"_dataset": ("Corpus", "CorpusDataset")}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
