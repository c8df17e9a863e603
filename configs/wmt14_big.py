"""WMT 2014 English to German, the paper's big model (N = 6, 1024 / 16 / 4096): arXiv 1706.03762, sections 5 and 6.1.

Usage: python train.py configs/wmt14_big.py

Equals configs/wmt14_base.py except for dropout 0.3, 300,000 steps, and a checkpoint every 600 steps (the paper's 10
minutes), of which the last 20 are kept, 2.6 GB each: `python -m transformer average runs/wmt14_big --last 20`.
English to French, with dropout 0.1 as in the paper: --data.name wmt14_translate/fr-en --data.target-language fr
--data.tokenizer.vocab-size 32000 --model.dropout-rate 0.1
For accelerators; 214 M parameters. Expected: the paper reports BLEU 28.4 on newstest2014 (tokenized, compounds split);
not trained here.
"""

from dataclasses import replace

from configs.wmt14_base import get_config as wmt14_base
from transformer.config import transformer_big
from transformer.training import CheckpointConfig, Recipe


def get_config() -> Recipe:
    recipe = wmt14_base()
    return replace(
        recipe,
        name="wmt14_big",
        model=transformer_big(dtype="bfloat16"),
        training=replace(recipe.training, steps=300_000),
        evaluation=replace(recipe.evaluation, every=3000),
        checkpoint=CheckpointConfig(every=600, keep_last=20),
    )
