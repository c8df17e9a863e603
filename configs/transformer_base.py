"""The base Transformer of the paper (N = 6, 512 / 8 / 2048) on sentence pairs of one's own.

Usage: python train.py configs/transformer_base.py --data.source-path train.en --data.target-path train.de

Two files with a sentence a line, or one file with a tab between source and target (then no --data.target-path). Adam
with beta2 0.98, the paper's schedule with 4,000 warm-up steps, label smoothing 0.1, dropout 0.1 (arXiv 1706.03762,
section 5). A batch has 256 pairs; the paper's had about 25,000 tokens a side. Little memory: --training.accumulation 4.
For an accelerator; about 60 M parameters, 100,000 steps. Expected: the paper has BLEU 27.3 on WMT14 en-de.
"""

from transformer.config import transformer_base
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
        name="transformer_base",
        model=transformer_base(),
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
        training=TrainingConfig(steps=100_000, label_smoothing=0.1),
        evaluation=EvaluationConfig(every=2000),
        checkpoint=CheckpointConfig(keep_last=5),
        logging=LoggingConfig(every=100),
    )
