"""GPT-2 with 124M parameters (12 layers, 768 / 12 / 3072, context 1,024), trained on your own text file.

Usage: python train.py configs/gpt2_124m.py --data.path my-text.txt --workdir runs/my-gpt2

For one TPU chip with 16 GiB, or several devices that share each batch. The model is that of Radford et al. 2019. AdamW
has the settings of nanoGPT (github.com/karpathy/nanoGPT, config/train_gpt2.py) with a smaller batch: 32,768 tokens.
Computation is in bfloat16; parameters and optimizer state are in float32. A BPE vocabulary of 50,257 tokens is trained
on the text; for less than about 100 MB of text, pass --data.tokenizer.vocab-size 8192. To continue the training of
OpenAI's model instead: --init openai-community/gpt2 --optimizer.learning-rate 1e-4.

On an accelerator: at least 25 minutes for 328M tokens on one v5e chip (TPU compiler estimate). Expected: not
measured on hardware; the loss depends on the text. Largest batch sizes for other TPUs: docs/colab.md.
"""

from transformer.config import Execution, gpt2_decoder
from transformer.data import TextFile, TokenizerConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    bpe = TokenizerConfig(kind="bpe", vocab_size=50_257)
    return Recipe(
        name="gpt2_124m",
        model=gpt2_decoder(d_model=768, num_layers=12, num_heads=12, dtype="bfloat16"),
        data=TextFile(path="your-text.txt", sequence_length=1024, batch_size=32, eval_batch_size=32, tokenizer=bpe),
        execution=Execution(remat="dots"),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=500, beta2=0.95, weight_decay=0.1),
        training=TrainingConfig(steps=10_000),
        evaluation=EvaluationConfig(every=500, batches=16),
        logging=LoggingConfig(every=10),
    )
