"""Fixtures of the tests of training."""

import dataclasses

import pytest

from transformer.training import CheckpointConfig, EvaluationConfig, LoggingConfig
from transformer.training import _loop as loop


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that the tests of a file share."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one_step_per_recipe():
    """Trace and compile the step of a recipe once for all runs of a file (new processes: test_processes).

    Intervals of messages, evaluations and checkpoints have no effect on the step.
    """
    made, place = {}, loop.place

    def place_once(recipe, make_step):
        same = {"logging": LoggingConfig(), "evaluation": EvaluationConfig(), "checkpoint": CheckpointConfig()}
        key = dataclasses.replace(recipe, **same), make_step
        if key not in made:
            made[key] = place(recipe, make_step)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "place", place_once)
        yield
