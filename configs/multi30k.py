"""Multi30k, English to German: captions of photographs, 29,000 pairs, an encoder-decoder of 2.6 million parameters.

Usage: python train.py configs/multi30k.py

Then: python -m transformer evaluate run runs/multi30k --split test, and
python -m transformer translate runs/multi30k < in.txt.
Joint BPE vocabulary of 6,000 tokens on lower-cased, tokenized captions; batches of about 4,096 source and 4,096 target
tokens in six length buckets; beam size 5. Without network access: pass --data.manual-dir FOLDER; the error message
lists the files that it must contain.
On 2 CPU cores: about 2 hours on a busy machine. Expected: BLEU 41.35 +- 0.18 on test_2016_flickr, tokenized and
lower-cased (three seeds: 41.14, 41.41, 41.50; chrF 65.95 +- 0.16). Published for this model size: 41.02
(github.com/LividWo/Revisit-MMT, README-baseline.md, Transformer-Tiny).
"""

from transformer.config import Execution, FeedForwardOptions, NormOptions, RotaryOptions, TransformerConfig
from transformer.data import Multi30k, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="multi30k",
        model=TransformerConfig(
            d_model=128,
            num_layers=4,
            num_heads=4,
            feed_forward=FeedForwardOptions(d_ff=512),
            dropout_rate=0.3,
            norm=NormOptions(kind="rms_norm"),
            position=RotaryOptions(),
        ),
        data=Multi30k(
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=6_000),
            batch_tokens=4096,
            buckets=6,
        ),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=4e-3,
            warmup_steps=400,
            final_fraction=0.0,
            beta2=0.98,
            weight_decay=0.05,
        ),
        training=TrainingConfig(steps=7000, label_smoothing=0.1, ema_decay=0.998),
        evaluation=EvaluationConfig(every=250, beam_size=5, beam_alpha=1.0),
        logging=LoggingConfig(every=25),
    )
