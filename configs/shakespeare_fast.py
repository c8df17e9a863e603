"""Tiny Shakespeare by characters, more of it learnt from as much text: the sizes and tokens of shakespeare_cpu.

Usage: python train.py configs/shakespeare_fast.py

4 layers, 4 heads, d_model 128, context 64, batch 12, 2,000 steps, and what the field has learnt since: Muon, RMSNorm,
QK-norm, the square of ReLU, no biases, a constant rate that ends in a long fall to 0. What each is worth:
docs/shakespeare-fast.md. On 2 CPU cores: about 5 minutes. Expected: eval loss 1.58 to 1.60 on the file's last 10 %.
Without network: --data.manual-dir FOLDER, with input.txt in it.
"""

from dataclasses import replace

from configs.shakespeare_cpu import get_config as shakespeare_cpu
from transformer.training import OptimizerConfig, Recipe


def get_config() -> Recipe:
    recipe = shakespeare_cpu()
    return replace(
        recipe,
        name="shakespeare_fast",
        model=recipe.model.replace(activation="relu2", use_bias=False, norm="rms_norm", **{"attention.qk_norm": True}),
        optimizer=OptimizerConfig(
            name="muon",
            learning_rate=1e-2,
            schedule="wsd",
            warmup_steps=100,
            decay_fraction=0.5,
            final_fraction=0.0,
            weight_decay=0.1,
        ),
    )
