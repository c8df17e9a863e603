"""A language model on text files of any number and size: JSON lines, text, Parquet, Arrow, or datasets of TFDS.

Usage: python train.py configs/text_corpus.py --data.paths 'corpus/*.jsonl' --workdir runs/my-corpus

A small decoder (d_model 256, 6 layers, context 512) with a BPE vocabulary of 8,192 tokens, which is learned from a
sample of the text. Several sources are mixed: --data.paths 'web/*.parquet' 'books/*.txt' --data.weights 0.7 0.3. The
text is tokenized once (docs/data.md); one percent of the documents is held out. The documents are packed: attention
stays within a document.

On an accelerator: at least a few minutes for 164M tokens; on a CPU, pass a smaller model and fewer steps. Expected: not
measured; the loss depends on the text.
"""

from transformer.config import FeedForwardOptions, RotaryOptions, TransformerConfig
from transformer.data import TextFiles, TokenizerConfig
from transformer.training import EvaluationConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    bpe = TokenizerConfig(kind="bpe", vocab_size=8192)
    return Recipe(
        name="text_corpus",
        model=TransformerConfig(
            d_model=256,
            num_layers=6,
            num_heads=8,
            feed_forward=FeedForwardOptions(activation="gelu_tanh"),
            position=RotaryOptions(),
        ),
        data=TextFiles(
            paths=("corpus/*.jsonl",),
            sequence_length=512,
            batch_size=32,
            eval_batch_size=32,
            packing=True,
            tokenizer=bpe,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=200, weight_decay=0.1),
        training=TrainingConfig(steps=10_000),
        evaluation=EvaluationConfig(every=1000, batches=32),
    )
