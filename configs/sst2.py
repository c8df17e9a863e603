"""Sentiment classification of movie reviews from scratch (SST-2, whole sentences), with a small encoder.

Usage: python train.py configs/sst2.py

6,920 training, 872 validation and 1,821 test sentences of 19 words on average (Socher et al. 2013); no phrases, no
pretraining. A larger model overfits so few sentences within a few epochs. For this reason the model has one layer of
width 64 without positions, and trains with strong dropout, label smoothing and averaged parameters. Bag-of-words
baseline on the same sentences: python -m benchmarks.bag_of_words. To start from a masked language model: --init
runs/mlm (configs/mlm.py). For the texts of GLUE and a pretrained model: configs/finetune_classifier.py.

On 2 CPU cores: about a minute. Expected: 80.0 % test accuracy (79.9 to 80.1 % over three seeds), no more than a bag of
words: 80.3 to 82.2 % depending on the features, 80.3 % with the features that are best on the validation set.
"""

from transformer.config import FeedForwardOptions, OutputOptions, TransformerConfig
from transformer.data import SST2Sentences, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig

PASS = 6_920 // 64
"""steps per epoch"""


def get_config() -> Recipe:
    sizes = {"d_model": 64, "num_layers": 1, "num_heads": 4}
    return Recipe(
        name="sst2",
        model=TransformerConfig(
            **sizes,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            position=None,
            dropout_rate=0.5,
            output=OutputOptions(num_classes=2),
        ),
        data=SST2Sentences(
            max_length=48, batch_size=64, eval_batch_size=128, tokenizer=TokenizerConfig(kind="word", vocab_size=8000)
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100, final_fraction=0.0),
        training=TrainingConfig(steps=5 * PASS, label_smoothing=0.1, ema_decay=0.99),
        evaluation=EvaluationConfig(every=PASS),
        logging=LoggingConfig(every=20),
    )
