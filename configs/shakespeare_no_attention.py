"""Tiny Shakespeare, character level, without attention: equals shakespeare.py, but each position sees only itself.

Usage: python train.py configs/shakespeare_no_attention.py

The model reads one character to predict the next, so its loss stays above the bigram entropy of the text
(docs/without-attention.md). On 2 CPU cores: about 2 minutes. Expected: held-out loss 2.49 nats on the last 10 % of the
file. Without network access: pass --data.manual-dir FOLDER, where FOLDER contains input.txt.
"""

from dataclasses import replace

from configs.shakespeare import get_config as shakespeare
from transformer.config import LayerKind
from transformer.training import Recipe


def get_config() -> Recipe:
    recipe = shakespeare()
    model = recipe.model.replace(**{"stack.period": (LayerKind(self_attention=False),)})
    return replace(recipe, name="shakespeare_no_attention", model=model)
