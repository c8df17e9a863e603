"""The table of training tasks, `TASKS`.

Other code never compares names of tasks; it uses the attributes and methods of the task. To add a task, write a class
and add it to `TASKS`.
"""

from __future__ import annotations

from transformer.training._captioning_task import Captioning
from transformer.training._contrastive_task import Contrastive
from transformer.training._numeric_tasks import Forecasting, ImageClassification
from transformer.training._reference_tasks import PolicyOptimization, PreferenceOptimization
from transformer.training._task_base import Task
from transformer.training._token_tasks import (
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
