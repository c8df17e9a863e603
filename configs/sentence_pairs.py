"""An encoder-decoder, the paper's base model (N = 6, 512 / 8 / 2048), trained on your own sentence pairs.

Usage: python train.py configs/sentence_pairs.py --data.source-path train.en --data.target-path train.de

Pass two files with one sentence per line, or one file with a tab between source and target (without
--data.target-path). The last tenth is held out, unless you pass --data.validation-source-path and
--data.validation-target-path. Training settings as in configs/wmt14_base.py. For little data: fewer --training.steps
and a smaller --data.tokenizer.vocab-size. For little memory: --training.accumulation 4. The big model: --model.d-model
1024 --model.num-heads 16 --model.feed-forward.d-ff 4096 --model.dropout-rate 0.3 --training.steps 300000. For an
accelerator; about 60 M parameters. Expected: depends on the pairs; docs/translation.md has measurements on Multi30k,
configs/wmt14_base.py the paper's results on WMT 2014.
"""

from dataclasses import replace

from configs.wmt14_base import get_config as wmt14_base
from transformer.data import ParallelText, TokenizerConfig
from transformer.training import EvaluationConfig, Recipe


def get_config() -> Recipe:
    # Model, optimizer, number of steps and checkpoints are those of the paper.
    recipe = wmt14_base()
    return replace(
        recipe,
        name="sentence_pairs",
        data=ParallelText(
            source_path="your-source.txt",
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=32_000),
            max_source_length=256,
            max_target_length=256,
            batch_tokens=25_000,
            eval_batch_size=64,
        ),
        evaluation=EvaluationConfig(every=2000, beam_size=4),
    )
