"""Tiny Shakespeare, character level, with a lower loss from the same model size and tokens as shakespeare_cpu.

Usage: python train.py configs/shakespeare_fast.py

4 layers, 4 heads, d_model 128, context 64, batch size 12, 2,000 steps, with newer methods: Muon, RMSNorm, QK-norm,
squared ReLU, no biases, and a warmup-stable-decay schedule with a long decay to 0. The effect of each one:
docs/shakespeare-fast.md. On 2 CPU cores: about 5 minutes. Expected: held-out loss 1.58 to 1.60 nats on the last 10 % of
the file. Without network access: pass --data.manual-dir FOLDER, where FOLDER contains input.txt.
"""

from dataclasses import replace

from configs.shakespeare_cpu import get_config as shakespeare_cpu
from transformer.config import QKNorm
from transformer.training import OptimizerConfig, Recipe


def get_config() -> Recipe:
    recipe = shakespeare_cpu()
    return replace(
        recipe,
        name="shakespeare_fast",
        model=recipe.model.replace(
            **{
                "parameters.use_bias": False,
                "norm.kind": "rms_norm",
                "feed_forward.activation": "relu2",
                "attention.qk_norm": QKNorm(),
            },
        ),
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
