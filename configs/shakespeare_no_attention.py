"""Tiny Shakespeare by characters without attention: all else as in shakespeare.py, each position sees itself alone.

Usage: python train.py configs/shakespeare_no_attention.py

The model reads one character to guess the next, so its loss stays above the bigram entropy of the text
(docs/without-attention.md). On 2 CPU cores: about 2 minutes. Expected: eval loss 2.49 on the last 10 % of the file.
Without network: --data.manual-dir FOLDER, with input.txt in it.
"""

from transformer.config import Execution, LayerKind, StackOptions, TransformerConfig
from transformer.data import TinyShakespeare
from transformer.training import EvaluationConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="shakespeare_no_attention",
        model=TransformerConfig(
            d_model=128,
            num_layers=2,
            num_heads=2,
            activation="gelu_tanh",
            position="rotary",
            stack=StackOptions(period=(LayerKind(self_attention=False),)),
        ),
        data=TinyShakespeare(sequence_length=128, batch_size=16, eval_batch_size=64),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
        training=TrainingConfig(steps=2000),
        evaluation=EvaluationConfig(every=500),
    )
