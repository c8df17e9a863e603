"""Small recipes and a topology for tests of plans."""

import dataclasses

from transformer.config import AttentionOptions, Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import ParallelText, TextFile
from transformer.nn._sharding import ParallelConfig
from transformer.training import Recipe
from transformer.training.plan import parse_topology

TEXT = Recipe(
    name="text",
    model=TransformerConfig(
        vocab_size=96,
        d_model=32,
        num_heads=4,
        attention=AttentionOptions(num_kv_heads=2),
        num_layers=3,
        feed_forward=FeedForwardOptions(d_ff=64),
        position=RotaryOptions(),
    ),
    data=TextFile(path="nowhere.txt", sequence_length=24, batch_size=8),
)
PAIRS = dataclasses.replace(
    TEXT, data=ParallelText(source_path="nowhere.tsv", max_source_length=12, max_target_length=10, batch_size=8)
)
SMALL = dataclasses.replace(TEXT, model=TEXT.model.replace(num_layers=1), execution=Execution(scan=False))
BY_TOKENS = dataclasses.replace(
    PAIRS, data=ParallelText(source_path="nowhere.tsv", max_source_length=12, max_target_length=10, batch_tokens=150)
)
CHIPS = parse_topology("v5e:2x4")


def parallel(recipe, **sizes):
    return dataclasses.replace(recipe, parallel=ParallelConfig(**sizes))
