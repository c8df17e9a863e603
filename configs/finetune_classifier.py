"""Fine-tune a pretrained encoder, such as BERT, for sentiment classification (SST-2).

Usage: python train.py configs/finetune_classifier.py --init bert-base-uncased --data.manual-dir SST-2

Needs a directory with weights, config.json and tokenizer.json (BERT-base: google-bert/bert-base-uncased), and a folder
with train.tsv and dev.tsv of SST-2 from the GLUE benchmark. To train only low-rank updates (LoRA), with a third of the
memory for parameters and optimizer state: --lora.rank 8 --optimizer.learning-rate 5e-4. For your own classes, write a
recipe with LabeledText as its data (docs/fine-tuning.md).

For an accelerator, where three epochs over 67,349 texts take minutes; an estimated one to two days on 2 CPU cores.
Expected: the published figures, not measured here. BERT-base: 93.5 % on the hidden test set (Devlin et al. 2018, table
1), about 92 to 93 % on dev.tsv. Batch size, learning rate, dropout and epochs are among those of the paper (appendix
A.3). The learning rate follows a cosine schedule; the paper uses linear decay.
"""

from transformer.config import AttentionOptions, OutputOptions, TransformerConfig
from transformer.data import SST2
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    steps = 3 * 67_349 // 32
    return Recipe(
        name="finetune_classifier",
        # --init sets all other fields of the model.
        model=TransformerConfig(
            output=OutputOptions(num_classes=2), dropout_rate=0.1, attention=AttentionOptions(dropout_rate=0.1)
        ),
        data=SST2(max_length=128, batch_size=32),
        optimizer=OptimizerConfig(
            learning_rate=2e-5, warmup_steps=steps // 10, final_fraction=0.0, beta2=0.999, epsilon=1e-6
        ),
        training=TrainingConfig(steps=steps),
        evaluation=EvaluationConfig(every=500),
        logging=LoggingConfig(every=50),
    )
