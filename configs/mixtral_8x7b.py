"""A decoder with the shape of Mixtral 8x7B (32 layers, 4096 / 32 / 14336, 2 of 8 experts), trained on your own text.

Usage: python train.py configs/mixtral_8x7b.py --data.path my-text.txt --workdir runs/my-mixtral

Shape, vocabulary size and rotary base are those of mistralai/Mixtral-8x7B-v0.1 (arXiv 2401.04088, table 1). The paper
does not publish the training settings, so context, batch size and optimizer are those of configs/llama3_8b.py. The
weight of the load-balancing loss is 0.01 per layer (arXiv 2101.03961, section 2.2). The vocabulary is trained on the
text, which must be large enough for it.
For accelerators with at least 800 GB of memory in total; 46,702,792,704 parameters. Expected: not trained here; the
requirements are in docs/scaling.md. Plan the run first:
python -m transformer plan train mixtral_8x7b --topology v5p:4x4x4
"""

from dataclasses import replace

from configs.llama3_8b import get_config as llama3_8b
from transformer.config import LayerKind, MoE, RotaryOptions, StackOptions
from transformer.training import Recipe


def get_config() -> Recipe:
    recipe = llama3_8b()
    experts = MoE(num_experts=8, top_k=2, load_balance_weight=0.01, router_z_weight=0.0)
    return replace(
        recipe,
        name="mixtral_8x7b",
        model=recipe.model.replace(
            vocab_size=32_000,
            position=RotaryOptions(base=1_000_000.0),
            stack=StackOptions(period=(LayerKind(moe=experts),)),
        ),
        data=replace(recipe.data, tokenizer=replace(recipe.data.tokenizer, vocab_size=32_000)),
    )
