"""A decoder with the shape of Llama 3 70B (80 layers, 8192 / 64 / 28672, 8 KV heads), trained on your own text.

Usage: python train.py configs/llama3_70b.py --data.path my-text.txt --workdir runs/my-llama

Equals configs/llama3_8b.py except for the shape, the learning rate (both from arXiv 2407.21783, table 3) and the batch
size. The vocabulary is trained on the text, which must be large enough for it.
For accelerators with at least 1.1 TB of memory in total; 70,553,706,496 parameters. Expected: not trained here; the
requirements are in docs/scaling.md. Plan the run first:
python -m transformer plan train llama3_70b --topology v5p:8x8x8
"""

from dataclasses import replace

from configs.llama3_8b import get_config as llama3_8b
from transformer.training import Recipe


def get_config() -> Recipe:
    recipe = llama3_8b()
    return replace(
        recipe,
        name="llama3_70b",
        model=recipe.model.replace(d_model=8192, num_layers=80, num_heads=64, **{"feed_forward.d_ff": 28_672}),
        data=replace(recipe.data, batch_size=512, eval_batch_size=512),
        optimizer=replace(recipe.optimizer, learning_rate=1.5e-4),
    )
