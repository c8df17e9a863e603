"""Questions about numbers: supervised fine-tuning on generated conversations, which continues configs/number_text.py.

Usage: python train.py configs/number_chat.py --init runs/number_text

Questions such as "Write 342 in words." and "What is 12 plus 30?"; no training question asks about the numbers of a test
question. On 2 CPU cores: about 4 minutes. Expected: exact match of the greedy answers to about 500 test questions
0 % before and about 70 % after training. The next stages are configs/number_dpo.py and
configs/number_grpo.py (docs/fine-tuning.md).
"""

from dataclasses import replace

from configs.number_text import get_config as number_text
from transformer.data import NumberChat
from transformer.training import EvaluationConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    recipe = number_text()
    return replace(
        recipe,
        name="number_chat",
        data=NumberChat(sequence_length=128, batch_size=16, eval_batch_size=64),
        optimizer=replace(recipe.optimizer, learning_rate=5e-3),
        training=TrainingConfig(steps=600),
        evaluation=EvaluationConfig(every=100, sample_tokens=40, temperature=0.0),
    )
