"""The table of training tasks, `TASKS`.

Other code never compares names of tasks; it uses the attributes and methods of the task. To add a task, write a class
and add it to `TASKS`.
"""

from __future__ import annotations

from transformer.training.tasks._base import Task
from transformer.training.tasks._captions import Captioning, Contrastive
from transformer.training.tasks._numbers import Forecasting, ImageClassification
from transformer.training.tasks._references import PolicyOptimization, PreferenceOptimization
from transformer.training.tasks._texts import (
    Classification,
    LanguageModeling,
    MaskedLanguageModeling,
    SupervisedFineTuning,
    Translation,
)

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        LanguageModeling(),
        SupervisedFineTuning(),
        PreferenceOptimization(),
        PolicyOptimization(),
        Translation(),
        Classification(),
        MaskedLanguageModeling(),
        ImageClassification(),
        Forecasting(),
        Contrastive(),
        Captioning(),
    )
}
"""all tasks, by name"""
