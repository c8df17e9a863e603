"""Tiny Shakespeare, character level, on a GPU: 6 layers, 6 heads, d_model 384, context 256, batch size 64, 5,000 steps.

Usage: python train.py configs/shakespeare_gpu.py

Model size, dropout and number of updates of nanoGPT's recipe for GPUs; its README reports 1.4697 nats as the lowest
loss on the last 10 % of the file. Matrix multiplications in bfloat16. Training takes about 80 epochs, so the held-out
loss rises again before the end: the model is evaluated every 250 steps, and the best checkpoint is kept and used. For
one accelerator; 10.6 M parameters. Expected: a lowest loss of at most 1.47; not trained here. Without network access:
pass --data.manual-dir FOLDER, where FOLDER contains input.txt.
"""

from transformer.config import (
    AttentionOptions,
    FeedForwardOptions,
    NormOptions,
    ParameterOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.data import TinyShakespeare
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    sizes = {"d_model": 384, "num_layers": 6, "num_heads": 6}
    return Recipe(
        name="shakespeare_gpu",
        model=TransformerConfig(
            **sizes,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            parameters=ParameterOptions(use_bias=False),
            norm=NormOptions(kind="layer_norm_without_bias"),
            position=RotaryOptions(),
            dropout_rate=0.2,
            attention=AttentionOptions(dropout_rate=0.2),
            dtype="bfloat16",
        ),
        data=TinyShakespeare(sequence_length=256, batch_size=64, eval_batch_size=64),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, weight_decay=0.1),
        training=TrainingConfig(steps=5000),
        evaluation=EvaluationConfig(every=250),
        logging=LoggingConfig(every=50),
    )
