"""Tiny Shakespeare, character level, on a CPU: 4 layers, 4 heads, d_model 128, context 64, batch size 12, 2,000 steps.

Usage: python train.py configs/shakespeare_cpu.py

Without dropout, like nanoGPT's recipe for CPUs, which reaches 1.88 nats on the last 10 % of the file. On 2 CPU cores:
about 3 minutes. Expected: held-out loss 1.70 or 1.71 nats. Without network access: pass --data.manual-dir FOLDER, where
FOLDER contains input.txt.
"""

from transformer.config import Execution, FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import TinyShakespeare
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="shakespeare_cpu",
        model=TransformerConfig(
            d_model=128,
            num_layers=4,
            num_heads=4,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            position=RotaryOptions(),
        ),
        data=TinyShakespeare(sequence_length=64, batch_size=12, eval_batch_size=64),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, weight_decay=0.1),
        training=TrainingConfig(steps=2000),
        evaluation=EvaluationConfig(every=500),
        logging=LoggingConfig(every=50),
    )
