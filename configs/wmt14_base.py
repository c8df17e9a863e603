"""WMT 2014 English to German, the paper's base model (N = 6, 512 / 8 / 2048): arXiv 1706.03762, sections 5 and 6.1.

Usage: python train.py configs/wmt14_base.py

4.5 M pairs, a joint BPE vocabulary of 37,000 tokens, batches of pairs of similar length with at most 25,000 source and
25,000 target tokens, Adam (0.9, 0.98, 1e-9), the paper's schedule with 4,000 warm-up steps, label smoothing 0.1,
dropout 0.1, 100,000 steps. At the end, newstest2014 is translated with beam size 4 and length penalty 0.6. The run
saves a checkpoint every 1,500 steps (the paper's 10 minutes) and keeps the last 5 of them:
`python -m transformer average runs/wmt14_base --last 5`. Two differences from the paper: matrix multiplications are in
bfloat16, and sentences of more than 256 tokens are left out. docs/translation.md explains how to prepare the data
(once, with TFDS), and the requirements of the recipe.
English to French: --data.name wmt14_translate/fr-en --data.target-language fr --data.tokenizer.vocab-size 32000
With more than 8 devices: set --data.row-multiple to their number. For accelerators; 63 M parameters. Expected: the
paper reports BLEU 27.3 on newstest2014 (tokenized, compounds split; not comparable with sacreBLEU on plain text); not
trained here.
"""

from transformer.config import transformer_base
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
        name="wmt14_base",
        model=transformer_base(dtype="bfloat16"),
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
        training=TrainingConfig(steps=100_000, label_smoothing=0.1),
        evaluation=EvaluationConfig(every=1500, exact_match_examples=3003, beam_size=4, beam_alpha=0.6),
        checkpoint=CheckpointConfig(keep_last=5),
        logging=LoggingConfig(every=100),
    )
