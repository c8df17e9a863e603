"""Assumptions of a plan about values that the data would determine; a plan reads no data and lists its assumptions."""

from __future__ import annotations

import dataclasses

from transformer.config._checks import ConfigError
from transformer.data._pairs import PairConfig
from transformer.data.kinds._number_words import NumberWords
from transformer.data.kinds._shapes import Shapes
from transformer.training._flops import batch_field, batch_rows
from transformer.training._recipe import Recipe, with_vocabulary
from transformer.training.tasks._captions import with_image_token
from transformer.training.tasks._table import TASKS

ASSUMED_LENGTH = 64
"""assumed length of a source or target in tokens, if the recipe leaves it to the data"""
ASSUMED_VOCABULARY = {"char": 128, "byte": 259, "bpe": 8192}
"""assumed vocabulary size by kind of tokenizer, if the recipe leaves it to the data"""


def without_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """Fill in the fields of a recipe that the data would determine.

    Returns:
        the completed recipe, and a phrase for each assumption.

    Raises:
        ConfigError: the vocabulary size can't be known without the data, batch_tokens is too small for a row, or the
            data is packed pairs, which a plan does not support yet.
    """
    assumed, data = [], recipe.data
    if TASKS[recipe.task].tokens and recipe.model.vocab_size is None:
        kind, small = data.tokenizer.kind, 128 if isinstance(data, NumberWords | Shapes) else 0
        size = data.tokenizer.vocab_size or ASSUMED_VOCABULARY.get(kind) or small
        if not size:
            raise ConfigError(
                f"the size of the {kind} vocabulary depends on the data, which a plan does not read. Pass "
                f"--model.vocab-size."
            )
        recipe = with_vocabulary(recipe, size)
        assumed.append(f"a vocabulary of {size:,} (--model.vocab-size)")
    images = recipe.model.image_tokens
    if images is not None and images.token_id is None:
        recipe = with_image_token(recipe, recipe.model.vocab_size - 1)
    if hasattr(data, "labels") and recipe.model.output.num_classes is None:
        classes = len(data.labels) or 2
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": classes}))
        assumed += [] if data.labels else ["2 classes (--model.output.num-classes)"]
    free = [field for field in data.open_lengths if getattr(data, field) is None]
    length = min(ASSUMED_LENGTH, recipe.model.max_length or ASSUMED_LENGTH)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **dict.fromkeys(free, length)))
    # f[4:10] is "source" or "target" of "max_source_length" and "max_target_length".
    assumed += [f"{f[4:10]}s of {length} tokens (--data.{f.replace('_', '-')})" for f in free]
    if batch_field(recipe.data) == "batch_tokens":
        assumed.append(_widest_bucket(recipe.data))
    return recipe, assumed


def _widest_bucket(data: PairConfig) -> str:
    """Return the assumption about batches with data.batch_tokens; ConfigError if no row fits, or pairs are packed."""
    if data.packed_length is not None:
        raise ConfigError(
            "a plan does not support packed pairs yet. Remove --data.packed-length to plan batches of similar lengths."
        )
    width, rows = max(data.max_source_length, data.max_target_length), batch_rows(data)
    if not rows:
        raise ConfigError(
            f"data.batch_tokens ({data.batch_tokens:,}) is too small for row_multiple ({data.row_multiple}) pairs of "
            f"{width} tokens. Pass at least {width * data.row_multiple:,}, or a smaller --data.max-source-length and "
            "--data.max-target-length."
        )
    return f"batches of the longest pairs: {rows} pairs of {width} tokens (--data.batch-tokens)"
