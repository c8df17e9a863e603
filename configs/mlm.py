"""Masked language modeling as in BERT (Devlin et al. 2018), to pretrain an encoder for a classifier.

Usage: python train.py configs/mlm.py

In each epoch, 15 % of the words of a sentence are selected at random as targets: 80 % of them are replaced by the mask
token, 10 % by a random token, and 10 % are unchanged. The data is the sentences of SST-2 without their labels. For your
own file with one text per line, write a recipe with MaskedText as its data. To train a classifier from the resulting
model and tokenizer: python train.py configs/sst2.py --init runs/mlm.

On 2 CPU cores: about 10 minutes on a busy machine; nearly all of the time is spent in the projection to 8,000 words.
Expected: 5.97 nats per target and 15.4 % accuracy on the test set (one seed). With so few sentences, the model learns
little more than which words are frequent: the classifier initialized from it has 78.1 % test accuracy, the one trained
from scratch 80.0 %.
"""

from transformer.config import FeedForwardOptions, TransformerConfig
from transformer.data import MaskedSST2, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="mlm",
        model=TransformerConfig(
            d_model=64,
            num_layers=1,
            num_heads=4,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            dropout_rate=0.1,
        ),
        data=MaskedSST2(
            max_length=48, batch_size=64, eval_batch_size=128, tokenizer=TokenizerConfig(kind="word", vocab_size=8000)
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        training=TrainingConfig(steps=1000),
        evaluation=EvaluationConfig(every=200),
        logging=LoggingConfig(every=20),
    )
