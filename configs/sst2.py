"""An encoder learns from scratch to tell negative from positive sentences of movie reviews (SST-2, whole sentences).

Usage: python train.py configs/sst2.py

6,920 sentences of 19 words to train on, 872 to choose by, 1,821 to test (Socher et al. 2013); no phrases, and nothing
pretrained. So few overfit anything within a few passes: one layer of width 64 without positions, strong dropout,
smoothed labels and averaged parameters. What a bag of words reaches on the same sentences:
python -m benchmarks.bag_of_words. From a model that learnt to fill in hidden words: --init runs/mlm (configs/mlm.py).
The texts of GLUE and a pretrained model: configs/finetune_classifier.py.

On 2 CPU cores: about a minute. Expected: 80.0 % of the test sentences right (79.9 to 80.1 % in three seeds), no more
than a bag of words: 80.3 to 82.2 % by the kind of features, 80.3 % with those that do best on validation.
"""

from transformer.config import OutputOptions, TransformerConfig
from transformer.data import SST2Sentences, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig

PASS = 6_920 // 64
"""steps in which each sentence is seen once"""


def get_config() -> Recipe:
    sizes = {"d_model": 64, "num_layers": 1, "num_heads": 4}
    return Recipe(
        name="sst2",
        model=TransformerConfig(
            **sizes,
            activation="gelu_tanh",
            position="none",
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
