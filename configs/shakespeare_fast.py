"""Tiny Shakespeare by characters, more of it learnt from as much text: the sizes and tokens of shakespeare_cpu.

Usage: python train.py configs/shakespeare_fast.py

4 layers, 4 heads, d_model 128, context 64, batch 12, 2,000 steps, and what the field has learnt since: Muon, RMSNorm,
QK-norm, the square of ReLU, no biases, a constant rate that ends in a long fall to 0. What each is worth:
docs/shakespeare-fast.md. On 2 CPU cores: about 5 minutes. Expected: eval loss 1.58 to 1.60 on the file's last 10 %.
Without network: --data.manual-dir FOLDER, with input.txt in it.
"""

from transformer.config import AttentionOptions, Execution, TransformerConfig
from transformer.data import TinyShakespeare
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return Recipe(
        name="shakespeare_fast",
        model=TransformerConfig(
            d_model=128,
            num_layers=4,
            num_heads=4,
            activation="relu2",
            use_bias=False,
            norm="rms_norm",
            position="rotary",
            attention=AttentionOptions(qk_norm=True),
        ),
        data=TinyShakespeare(sequence_length=64, batch_size=12, eval_batch_size=64),
        execution=Execution(scan=False),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=1e-2,
            schedule="wsd",
            warmup_steps=100,
            decay_fraction=0.5,
            final_fraction=0.0,
            weight_decay=0.1,
        ),
        training=TrainingConfig(steps=2000),
        evaluation=EvaluationConfig(every=500),
        logging=LoggingConfig(every=50),
    )
