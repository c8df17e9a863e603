"""Tokenizers: vocabularies learned from texts, tokenizers of pretrained models, and their files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformer.config._lazy import lazy_exports

if TYPE_CHECKING:
    from transformer.data.tokenizers._base import *  # noqa: F403
    from transformer.data.tokenizers._kinds import *  # noqa: F403

_EXPORTS = {"_base": ("Tokenizer",), "_kinds": ("load_tokenizer",)}
"""module -> the public names that it defines"""

__all__, __getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
