"""An encoder-decoder, the paper's base model (N = 6, 512 / 8 / 2048), on sentence pairs of one's own.

Usage: python train.py configs/sentence_pairs.py --data.source-path train.en --data.target-path train.de

Two files with a sentence a line, or one file with a tab between source and target (then no --data.target-path); the
last tenth is held out, or --data.validation-source-path and --data.validation-target-path. Training as in
configs/wmt14_base.py. Little data: fewer --training.steps, a smaller --data.tokenizer.vocab-size. Little memory:
--training.accumulation 4. The big model: --model.d-model 1024 --model.num-heads 16 --model.d-ff 4096
--model.dropout-rate 0.3 --training.steps 300000. For an accelerator; about 60 M parameters. Expected: depends on the
pairs; docs/translation.md has what was measured on Multi30k, configs/wmt14_base.py what the paper has on WMT 2014.
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
        name="sentence_pairs",
        model=transformer_base(dtype="bfloat16"),
        data=ParallelText(
            source_path="your-source.txt",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=32_000),
            max_source_length=256,
            max_target_length=256,
            batch_tokens=25_000,
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
        evaluation=EvaluationConfig(every=2000, beam_size=4),
        checkpoint=CheckpointConfig(keep_last=5),
        logging=LoggingConfig(every=100),
    )
