"""Number words from English to Spanish: an encoder-decoder that learns a small language completely.

Usage: python train.py configs/number_words.py

On 2 CPU cores: about 1 minute, including data, compilation and report. Expected: exact match on at least 99 % of 1,000
unseen numbers, in total and for each number of digits (measured: 99.9 to 100 %), and on all basics (0-20, d x 10^k).
Other languages: --data.source-language fr --data.target-language pt (de and it need --data.tokenizer.kind char).
"""

from transformer.config import Execution, FeedForwardOptions, NormOptions, TransformerConfig
from transformer.data import NumberWords
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="number_words",
        model=TransformerConfig(
            d_model=128,
            num_layers=2,
            num_heads=4,
            feed_forward=FeedForwardOptions(d_ff=512),
            norm=NormOptions(position="pre"),
        ),
        data=NumberWords(source_language="en", target_language="es", batch_size=128),
        execution=Execution(scan=False),  # two layers compile quickly, and unrolled layers are faster on a CPU
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=40),
        training=TrainingConfig(steps=300),
        evaluation=EvaluationConfig(every=100),
        logging=LoggingConfig(every=10),
    )
