"""Train a recipe: `python train.py number_words`. The same command as `python -m transformer train number_words`."""

from __future__ import annotations

import sys

from transformer.__main__ import console
from transformer.cli._train import main

__all__ = ["main"]

if __name__ == "__main__":
    console(["train", *sys.argv[1:]])
