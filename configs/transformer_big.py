"""The big Transformer of the paper (N = 6, 1024 / 16 / 4096) on sentence pairs of one's own.

Usage: python train.py configs/transformer_big.py --data.source-path train.en --data.target-path train.de

As configs/transformer_base.py, with 300,000 steps and dropout 0.3 (the paper's for en-de; en-fr had 0.1).
For accelerators; about 210 M parameters. Expected: the paper has BLEU 28.4 on WMT14 en-de.
"""

from transformer.config import transformer_big
from transformer.data import ParallelText, TokenizerConfig
from transformer.training import (
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    Recipe,
    TrainingConfig,
)


def get_config() -> Recipe:
    return Recipe(
        name="transformer_big",
        model=transformer_big(),
        data=ParallelText(
            source_path="your-source.txt",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=32_000),
            max_source_length=100,
            max_target_length=100,
            batch_size=256,
            eval_batch_size=64,
        ),
        optimizer=OptimizerConfig(
            learning_rate=1.0,
            schedule="noam",
            warmup_steps=4000,
            beta2=0.98,
            epsilon=1e-9,
            weight_decay=0.0,
            clip_norm=None,
        ),
        training=TrainingConfig(steps=300_000, label_smoothing=0.1),
        evaluation=EvaluationConfig(every=2000),
        checkpoint=CheckpointConfig(keep_last=5),
        logging=LoggingConfig(every=100),
    )
