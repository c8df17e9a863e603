"""A character-level language model on your own text file (UTF-8).

Usage: python train.py configs/text_file.py --data.path my-text.txt --workdir runs/my-text

The last tenth of the file is held out. On 2 CPU cores: about 4 minutes. Expected: depends on the text; Tiny
Shakespeare, 1.1 MB, reached 1.62 nats per character. For other languages and scripts, pass --data.tokenizer.kind byte
or bpe.
"""

from transformer.config import Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import TextFile
from transformer.training import EvaluationConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="text_file",
        model=TransformerConfig(
            d_model=128,
            num_layers=4,
            num_heads=4,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            position=RotaryOptions(),
        ),
        data=TextFile(path="your-text.txt", sequence_length=64, batch_size=32),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, weight_decay=0.1),
        training=TrainingConfig(steps=2000),
        evaluation=EvaluationConfig(every=500),
    )
