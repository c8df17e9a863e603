"""Llama 3.2 1B on your own text file: LoRA on one TPU chip, or full fine-tuning on eight chips.

Usage: python train.py configs/llama_1b.py --init meta-llama/Llama-3.2-1B --data.path my-text.txt

--init names the model: a directory of weights, or a name on the Hugging Face Hub, of any causal language model in the
zoo with about a billion parameters. Low-rank updates (Hu et al. 2021, arXiv 2106.09685) of rank 16 are trained for all
matrices of the layers, 0.9 % of the parameters. The other parameters are frozen in float32; computation is in bfloat16.

Full fine-tuning does not fit on one chip with 16 GiB: parameters, gradients and AdamW state take 18.4 GiB. On eight
chips they are sharded. To train all parameters there (without --init: from scratch):

    python train.py llama_1b --init DIR --data.path my-text.txt --lora None --data.batch-size 64

To train from scratch, also pass --optimizer.learning-rate 3e-4 --optimizer.weight-decay 0.1. For full fine-tuning, pass
a lower learning rate, such as 2e-5.

On an accelerator: at least 26 minutes for 2,000 steps of 16,384 tokens on one v5e chip (TPU compiler estimate).
Expected: not measured on hardware; the loss depends on the text. Largest batch sizes: docs/colab.md.
"""

from dataclasses import replace

from configs.llama3_8b import get_config as llama3_8b
from transformer.config import EmbeddingOptions, RotaryOptions, RotaryScaling, llama_decoder
from transformer.training import EvaluationConfig, LoRA, Recipe, TrainingConfig


def get_config() -> Recipe:
    recipe = llama3_8b()
    sizes = {"d_model": 2048, "num_layers": 16, "num_heads": 32, "attention.num_kv_heads": 8, "feed_forward.d_ff": 8192}
    return replace(
        recipe,
        name="llama_1b",
        model=llama_decoder(
            **sizes,
            dtype="bfloat16",
            position=RotaryOptions(base=500_000.0, scaling=RotaryScaling(kind="llama3", factor=32.0)),
            embedding=EmbeddingOptions(scale=False),
        ),
        data=replace(recipe.data, sequence_length=2048, batch_size=8, eval_batch_size=8),
        optimizer=replace(recipe.optimizer, learning_rate=2e-4, warmup_steps=100, weight_decay=0.0),
        training=TrainingConfig(steps=2000),
        evaluation=EvaluationConfig(every=200, batches=16),
        lora=LoRA(rank=16, alpha=32.0, targets=("query", "key", "value", "out", "up", "gate", "down")),
    )
