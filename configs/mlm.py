"""An encoder learns to fill in hidden words, as BERT does (Devlin et al. 2018); a start for a classifier of its own.

Usage: python train.py configs/mlm.py

15 % of the words of a sentence are to be predicted, drawn anew at each visit; of these 80 % are hidden, 10 % replaced
and 10 % left. The sentences are those of SST-2 without their labels; a file of yours, one text a line: write a recipe
with MaskedText as its data. Then: python train.py configs/sst2.py --init runs/mlm, which takes model and tokenizer.

On 2 CPU cores: about 10 minutes with other work beside it; nearly all of it is the map to 8,000 words. Expected: 5.97
nats a token to be predicted of the test, 15.4 % of them right (one seed): frequent words, for so few sentences teach no
more. The classifier that starts from it has 78.1 % of its test, where one from scratch has 80.0.
"""

from transformer.config import TransformerConfig
from transformer.data import MaskedSST2, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="mlm",
        model=TransformerConfig(d_model=64, num_layers=1, num_heads=4, activation="gelu_tanh", dropout_rate=0.1),
        data=MaskedSST2(
            max_length=48, batch_size=64, eval_batch_size=128, tokenizer=TokenizerConfig(kind="word", vocab_size=8000)
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        training=TrainingConfig(steps=1000),
        evaluation=EvaluationConfig(every=200),
        logging=LoggingConfig(every=20),
    )
