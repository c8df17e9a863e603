"""Right sums: GRPO with a reward for exactly right answers, which continues configs/number_chat.py.

Usage: python train.py configs/number_grpo.py --init runs/number_chat

The model writes eight answers to each question such as "What is 12 plus 30?". The reward of a right answer is 1, the
reward of any other is 0 (`transformer.training.exact_answer`). On 2 CPU cores: about 4 minutes. Expected: exact match
on 500 test sums 35.8 % before and 46.8 to 50.4 % after training (three seeds).
"""

from dataclasses import replace

from configs.number_chat import get_config as number_chat
from transformer.data import NumberPrompts
from transformer.training import GRPO, EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    rewards = ("transformer.training:exact_answer",)
    return replace(
        number_chat(),
        name="number_grpo",
        data=NumberPrompts(batch_size=32, eval_batch_size=128),
        grpo=GRPO(rewards=rewards, group_size=8, max_new_tokens=6, beta=0.01),
        optimizer=OptimizerConfig(learning_rate=4e-4, warmup_steps=10, final_fraction=0.1),
        training=TrainingConfig(steps=150),
        evaluation=EvaluationConfig(every=20),
        logging=LoggingConfig(every=5),
    )
