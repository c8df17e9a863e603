"""`train.py WORKDIR` resumes the run that is there with its own recipe."""

import dataclasses
import json
import shutil
from collections import namedtuple

import pytest

from tests.training_recipes import text_recipe
from transformer.cli._train import main
from transformer.config import ConfigError
from transformer.data import Prompts
from transformer.training import TrainingConfig, train
from transformer.training._recipe import load_recipe, save_recipe
from transformer.training.tasks._policy_gradient import GRPO

Finished = namedtuple("Finished", "exit_code")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumed")
    recipe = text_recipe(
        folder, evaluation={"every": None, "samples": 0}, training={"steps": 2}, checkpoint={"every": 2}
    )
    assert train(recipe, folder / "run").exit_code == 0
    return folder / "run"


def test_a_run_resumes_with_its_recipe(run, capsys):
    assert main([str(run), "--training.steps", "4"]) == 0
    assert f"workdir: {run}, resuming from step 2, to step 4" in capsys.readouterr().out
    assert load_recipe(run).training.steps == 4
    call = json.loads((run / "calls.jsonl").read_text().splitlines()[-1])
    assert str(run) in call["command"]


def test_a_different_workdir_is_rejected(run, tmp_path):
    with pytest.raises(ConfigError, match="--workdir"):
        main([str(run), "--workdir", str(tmp_path)])
    assert main([str(run), "--workdir", str(run)]) == 0


def test_rewards_that_a_recipe_file_names_are_not_run(run, tmp_path):
    data = Prompts(path="prompts.jsonl", batch_size=4)
    plain = dataclasses.replace(load_recipe(run), training=TrainingConfig(steps=2))
    plain = dataclasses.replace(plain, model=plain.model.replace(dropout_rate=0.0))
    recipe = dataclasses.replace(plain, data=data, grpo=GRPO(rewards=("rewards.py:share",), group_size=4))
    save_recipe(recipe, tmp_path)
    with pytest.raises(ConfigError, match="names rewards, which are code"):
        main([str(tmp_path)])


def test_a_recipe_comes_before_a_workdir_of_the_same_name(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "etth1")
    monkeypatch.setattr("transformer.training._loop.train", lambda recipe, *args, **options: Finished(recipe.name))
    assert main(["etth1"]) == "etth1"
    assert main(["./etth1"]) == load_recipe(run).name
