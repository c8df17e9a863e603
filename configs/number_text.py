"""Running text about numbers: a small decoder, the first of four recipes for a model that answers questions.

Usage: python train.py configs/number_text.py

The text consists of generated sentences such as "After 99 comes 100." and "12 plus 30 is 42.", as bytes; nothing is
downloaded. The tokenizer has the markers of a chat template for the next stages: configs/number_chat.py, then
configs/number_dpo.py or configs/number_grpo.py (docs/fine-tuning.md). On 2 CPU cores: about 3 minutes.
Expected: held-out loss 0.39 nats per byte; the numbers in a sentence are random, so the loss can't approach 0.
"""

from transformer.config import Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import NumberText
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    sizes = {"d_model": 128, "num_layers": 4, "num_heads": 4}
    return Recipe(
        name="number_text",
        model=TransformerConfig(
            **sizes, dropout_rate=0.0, feed_forward=FeedForwardOptions(activation="gelu_tanh"), position=RotaryOptions()
        ),
        data=NumberText(sequence_length=128, batch_size=16, eval_batch_size=64),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(
            name="muon", learning_rate=1e-2, warmup_steps=50, schedule="wsd", decay_fraction=0.5, final_fraction=0.0
        ),
        training=TrainingConfig(steps=600),
        evaluation=EvaluationConfig(every=200, sample_tokens=100),
        logging=LoggingConfig(every=20),
    )
