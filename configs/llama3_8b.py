"""A decoder with the shape of Llama 3 8B (32 layers, 4096 / 32 / 14336, 8 KV heads), trained on your own text.

Usage: python train.py configs/llama3_8b.py --data.path my-text.txt --workdir runs/my-llama

Shape, vocabulary size and learning rate are from arXiv 2407.21783, table 3; the other AdamW settings are from Llama 2
(arXiv 2307.09288). Context 8,192; matrix multiplications in bfloat16; scanned layers, recomputed in the backward pass;
parameters and optimizer state are sharded over all devices. The vocabulary is trained on the text, which must be large
enough for it.
For accelerators with at least 128 GB of memory in total; 8,030,261,248 parameters. Expected: not trained here; the
requirements are in docs/scaling.md. Plan the run first: python -m transformer plan train llama3_8b --topology v5p:4x4x4
"""

from transformer.config import Execution, RotaryOptions, llama_decoder
from transformer.data import TextFile, TokenizerConfig
from transformer.nn import ParallelConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    sizes = {
        "d_model": 4096,
        "num_layers": 32,
        "num_heads": 32,
        "attention.num_kv_heads": 8,
        "feed_forward.d_ff": 14_336,
    }
    return Recipe(
        name="llama3_8b",
        model=llama_decoder(
            **sizes,
            vocab_size=128_256,
            dtype="bfloat16",
            position=RotaryOptions(base=500_000.0),
        ),
        data=TextFile(
            path="your-text.txt",
            sequence_length=8192,
            batch_size=128,
            eval_batch_size=64,
            tokenizer=TokenizerConfig(kind="bpe", vocab_size=128_256),
        ),
        execution=Execution(remat="full"),
        parallel=ParallelConfig(data=1, fsdp=-1),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2000, beta2=0.95, weight_decay=0.1),
        training=TrainingConfig(steps=100_000),
        evaluation=EvaluationConfig(every=2000, batches=16),
        logging=LoggingConfig(every=10),
    )
