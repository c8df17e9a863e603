"""WMT 2014 English to German, the paper's big model (N = 6, 1024 / 16 / 4096): arXiv 1706.03762, sections 5 and 6.1.

Usage: python train.py configs/wmt14_big.py

As configs/wmt14_base.py, with dropout 0.3, 300,000 steps, a checkpoint every 600 steps (the paper's 10 minutes) and the
last 20 of them kept, 2.6 GB each: `python -m transformer average runs/wmt14_big --last 20`.
English to French, with dropout 0.1 as in the paper: --data.name wmt14_translate/fr-en --data.target-language fr
--data.tokenizer.vocab-size 32000 --model.dropout-rate 0.1
For accelerators; 214 M parameters. Expected: the paper has BLEU 28.4 on newstest2014 (tokenized, compounds split); not
trained here.
"""

from transformer.config import transformer_big
from transformer.data import TFDSTranslation, TokenizerConfig
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
        name="wmt14_big",
        model=transformer_big(dtype="bfloat16"),
        data=TFDSTranslation(
            name="wmt14_translate/de-en",
            source_language="en",
            target_language="de",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=37_000),
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
        training=TrainingConfig(steps=300_000, label_smoothing=0.1),
        evaluation=EvaluationConfig(every=3000, exact_match_examples=3003, beam_size=4, beam_alpha=0.6),
        checkpoint=CheckpointConfig(every=600, keep_last=20),
        logging=LoggingConfig(every=100),
    )
