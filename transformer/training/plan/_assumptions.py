"""What a plan has to assume where the data would decide: it reads none, and says so."""

from __future__ import annotations

import dataclasses

from transformer.config._checks import ConfigError
from transformer.data._pairs import PairConfig
from transformer.data.kinds._number_words import NumberWords
from transformer.training._flops import batch_field, batch_rows
from transformer.training._recipe import Recipe
from transformer.training._tasks import TASKS

ASSUMED_LENGTH = 64
"""tokens of a source or target where the recipe leaves that to the data"""
ASSUMED_VOCABULARY = {"char": 128, "byte": 259, "bpe": 8192}
"""tokens of a vocabulary by the kind of tokenizer, where the recipe leaves that to the data"""


def without_data(recipe: Recipe) -> tuple[Recipe, list[str]]:
    """The recipe with what the data would decide filled in, and a sentence for each of these.

    Raises:
        ConfigError: a vocabulary that nothing but the data can tell, batches too small for their rows, or packed
            pairs, which no plan knows yet.
    """
    assumed, data = [], recipe.data
    task = TASKS[recipe.task]
    if task.tokens and recipe.model.vocab_size is None:
        kind = data.tokenizer.kind
        size = (
            data.tokenizer.vocab_size or ASSUMED_VOCABULARY.get(kind) or (128 if isinstance(data, NumberWords) else 0)
        )
        if not size:
            raise ConfigError(
                f"the {kind} vocabulary follows from the data, which is not read. Give --model.vocab-size."
            )
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(vocab_size=size))
        assumed.append(f"a vocabulary of {size:,} (--model.vocab-size)")
    if task.labels and recipe.model.output.num_classes is None:
        classes = len(data.labels) or 2
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": classes}))
        assumed += [] if data.labels else ["2 classes (--model.num-classes)"]
    free = [field for field in data.open_lengths if getattr(data, field) is None]
    length = min(ASSUMED_LENGTH, recipe.model.max_length or ASSUMED_LENGTH)
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, **dict.fromkeys(free, length)))
    assumed += [f"{f[4:10]}s of {length} tokens (--data.{f.replace('_', '-')})" for f in free]
    if batch_field(recipe.data) == "batch_tokens":
        assumed.append(_widest_bucket(recipe.data))
    return recipe, assumed


def _widest_bucket(data: PairConfig) -> str:
    """A sentence on batches by tokens. ConfigError: packed ones, or no room for their rows."""
    if data.packed_length is not None:
        raise ConfigError("a plan knows no packed pairs yet. Leave --data.packed-length out: buckets are planned.")
    width, rows = max(data.max_source_length, data.max_target_length), batch_rows(data)
    if not rows:
        raise ConfigError(
            f"batch_tokens ({data.batch_tokens:,}) has no room for row_multiple ({data.row_multiple}) pairs of {width} "
            f"tokens. Give at least {width * data.row_multiple:,}, or a smaller --data.max-source-length and "
            "--data.max-target-length."
        )
    return f"every batch as the widest: {rows} pairs of {width} tokens (--data.batch-tokens)"
