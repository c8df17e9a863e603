"""Every recipe in configs/ is complete: it loads, says what it is, and its model can be built and trained."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.models import count_parameters
from transformer.training.overrides import load_recipe_file
from transformer.training.recipe import from_json, to_json, with_vocabulary
from transformer.training.state import abstract_state

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs").glob("*.py"))
NAMES = {"number_words", "shakespeare", "shakespeare_cpu", "text_file", "sentence_pairs", "wmt14_base"}


def recipe_of(name):
    return load_recipe_file(ROOT / "configs" / f"{name}.py")[0]


def test_the_recipes_are_there():
    assert {file.stem for file in FILES} >= NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_says_what_it_is_and_keeps_its_word(file):
    recipe, about = load_recipe_file(file)
    assert recipe.name == file.stem
    assert f"Usage: python train.py configs/{file.name}" in about
    assert "Expected: " in about
    assert "On 2 CPU cores: about" in " ".join(about.split()) or "accelerator" in about
    assert from_json(to_json(recipe)) == recipe
    assert ast.get_docstring(ast.parse(file.read_text())).splitlines()[0].endswith(".")
    state = abstract_state(with_vocabulary(recipe, 100))  # the whole model and optimizer, as shapes
    assert count_parameters(state.params) > 40_000


def test_the_paper_s_models_have_the_paper_s_sizes():
    """Table 3 of arXiv 1706.03762: 65 and 213 million, with 37,000 tokens; base and big differ in what it says."""
    for name, millions in (("wmt14_base", 65), ("wmt14_big", 213), ("sentence_pairs", 65)):
        recipe = with_vocabulary(recipe_of(name), 37_000)
        parameters = count_parameters(abstract_state(recipe).params)
        assert abs(parameters / 1e6 - millions) < 3, parameters
        assert recipe.model.norm_position == "post"
        optimizer, training = recipe.optimizer, recipe.training
        assert (optimizer.schedule, optimizer.warmup_steps, optimizer.learning_rate) == ("noam", 4000, 1.0)
        assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
        assert training.label_smoothing == 0.1
    assert recipe_of("wmt14_base").model.dropout_rate == 0.1
    assert recipe_of("wmt14_big").model.dropout_rate == 0.3


def test_shakespeare_has_the_sizes_that_were_asked_for():
    model = recipe_of("shakespeare").model
    assert (model.d_model, model.num_layers, model.num_heads) == (128, 2, 2)
    recipe = recipe_of("shakespeare_cpu")
    model, data = recipe.model, recipe.data
    assert (model.num_layers, model.num_heads, model.d_model, model.dropout_rate) == (4, 4, 128, 0.0)
    assert (data.sequence_length, data.batch_size, recipe.training.steps) == (64, 12, 2000)
    recipe = recipe_of("shakespeare_gpu")
    model, data = recipe.model, recipe.data
    assert (model.num_layers, model.num_heads, model.d_model, model.dropout_rate) == (6, 6, 384, 0.2)
    assert (data.sequence_length, data.batch_size, recipe.training.steps) == (256, 64, 5000)
    assert recipe.checkpoint.keep_best == 1  # the text is read some 80 times: the best model is not the last


def test_fast_runs_everything_once(tmp_path):
    tiny = "--model.d-model 8 --model.num-layers 1 --model.num-heads 2 --model.d-ff 8 --data.max-digits 2"
    small = f"--data.train-examples 200 --data.data-dir {tmp_path / 'tfds'} --logging.tensorboard False"
    command = [sys.executable, "train.py", "number_words", "--fast", *tiny.split(), *small.split()]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    for words in ("device: ", "compiling", "step 2: eval loss", "step 4/4", "exact match on the basics", "try it:"):
        assert words in run.stdout
    assert "\x1b" not in run.stdout + run.stderr  # no control codes into a pipe
    workdir = Path(run.stdout.rsplit("generate ", 1)[1].split()[0])
    assert {"2", "4"} <= {path.name for path in (workdir / "checkpoints").iterdir()}
    assert workdir.name.startswith("number_words-fast-")
