"""Answers in words: direct preference optimization on generated pairs, which continues configs/number_chat.py.

Usage: python train.py configs/number_dpo.py --init runs/number_chat

The chosen answer to a question is in words ("forty-two"), the rejected one in digits ("42"); both are right. After
configs/number_chat.py, an answer has the form of its question. On 2 CPU cores: about 1.5 minutes. Expected: the
chosen answer is the more probable one for 52.2 % of the test questions before and 91.6 % after training.
"""

from dataclasses import replace

from configs.number_chat import get_config as number_chat
from transformer.data import NumberPreferences
from transformer.training import DPO, EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig


def get_config() -> Recipe:
    return replace(
        number_chat(),
        name="number_dpo",
        data=NumberPreferences(max_length=128, batch_size=16, eval_batch_size=64),
        dpo=DPO(beta=0.1),
        optimizer=OptimizerConfig(learning_rate=1e-4, warmup_steps=10, final_fraction=0.0),
        training=TrainingConfig(steps=100),
        evaluation=EvaluationConfig(every=25),
        logging=LoggingConfig(every=5),
    )
