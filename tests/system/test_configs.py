"""Every recipe in configs/ is complete: it loads, has a description, and its model can be built and trained."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from transformer.config import ConfigError
from transformer.inference import start_from
from transformer.nn.models import count_parameters
from transformer.training._loop import train
from transformer.training._overrides import fast, load_recipe_file, override
from transformer.training._recipe import from_json, to_json, with_vocabulary
from transformer.training._state import abstract_state
from transformer.zoo.families._gpt2 import GPT2
from transformer.zoo.families._llama import LLAMA

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs").glob("*.py"))
NAMES = {"number_words", "shakespeare", "shakespeare_cpu", "text_file", "sentence_pairs", "wmt14_base"}


def recipe_of(name):
    return load_recipe_file(ROOT / "configs" / f"{name}.py")[0]


def test_every_bundled_recipe_exists():
    assert {file.stem for file in FILES} >= NAMES


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_matches_its_docstring(file):
    recipe, about = load_recipe_file(file)
    assert recipe.name == file.stem
    assert f"Usage: python train.py configs/{file.name}" in about
    assert "Expected: " in about
    assert "On 2 CPU cores: about" in " ".join(about.split()) or "accelerator" in about
    assert from_json(to_json(recipe)) == recipe
    if (images := recipe.model.image_tokens) is not None:
        recipe = dataclasses.replace(recipe, model=recipe.model.replace(input=dataclasses.replace(images, token_id=9)))
    state = abstract_state(with_vocabulary(recipe, 100))  # shapes of the whole model and optimizer state
    assert count_parameters(state.params) > 40_000


def test_the_models_of_the_paper_have_its_sizes():
    """Table 3 of arXiv 1706.03762: 65 and 213 million parameters with a vocabulary of 37,000 tokens."""
    for name, millions in (("wmt14_base", 65), ("wmt14_big", 213), ("sentence_pairs", 65)):
        recipe = with_vocabulary(recipe_of(name), 37_000)
        parameters = count_parameters(abstract_state(recipe).params)
        assert abs(parameters / 1e6 - millions) < 3, parameters
        assert recipe.model.norm.position == "post"
        optimizer, training = recipe.optimizer, recipe.training
        assert (optimizer.schedule, optimizer.warmup_steps, optimizer.learning_rate) == ("noam", 4000, 1.0)
        assert (optimizer.beta1, optimizer.beta2, optimizer.epsilon) == (0.9, 0.98, 1e-9)
        assert training.label_smoothing == 0.1
    assert recipe_of("wmt14_base").model.dropout_rate == 0.1
    assert recipe_of("wmt14_big").model.dropout_rate == 0.3


def test_shakespeare_has_the_specified_sizes():
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
    assert recipe.checkpoint.keep_best == 1  # about 80 epochs, so the best checkpoint is not the last one


def run_fast(folder, *words):
    """Run `train.py number_words --fast` with a tiny model, and with `folder` for temporary files."""
    tiny = "--model.d-model 8 --model.num-layers 1 --model.num-heads 2 --model.feed-forward.d-ff 8 --data.max-digits 2"
    small = f"--data.train-examples 200 --data.data-dir {folder / 'tfds'} --logging.tensorboard False"
    command = [sys.executable, "train.py", "number_words", "--fast", *tiny.split(), *small.split(), *words]
    (folder / "tmp").mkdir(exist_ok=True)
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False, env=environment)


@pytest.mark.slow
def test_fast_runs_everything_once(tmp_path):
    workdir = tmp_path / "kept"
    run = run_fast(tmp_path, "--workdir", str(workdir))
    assert run.returncode == 0, run.stderr
    for words in ("device: ", "compiling", "step 2: eval loss", "step 4/4", "exact match on the basics", "try it:"):
        assert words in run.stdout
    assert "\x1b" not in run.stdout + run.stderr  # no control codes in a pipe
    assert run.stdout.rsplit("generate ", 1)[1].split()[0] == str(workdir)
    assert {"2", "4"} <= {path.name for path in (workdir / "checkpoints").iterdir()}


@pytest.mark.slow
def test_fast_without_a_workdir_leaves_and_names_no_files(tmp_path):
    run = run_fast(tmp_path)
    assert run.returncode == 0, run.stderr
    *_, speed, last = run.stdout.splitlines()
    assert speed.startswith("speed: "), "the end of the report names no file"
    assert "Pass --workdir DIR to keep them" in last
    removed = Path(last.partition("(")[2].partition(")")[0])
    assert removed.name.startswith("number_words-fast-")
    assert removed.parent == tmp_path / "tmp"
    assert not removed.exists()


TINY = {
    "model": "d-model 16 feed-forward.d-ff 24 num-layers 2 num-heads 4 dtype float32",
    "data": "sequence-length 16 batch-size 4 eval-batch-size 4 tokenizer.vocab-size 300",
    "parallel": "devices 1",
    "logging": "tensorboard False progress none",
}


def tiny(name, folder, *words):
    """Return the recipe with `--fast`, a tiny model and tiny batches, on a text of a few lines."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {number} of a text of one's own" for number in range(200)))
    given = [f"--data.path={text}"]
    for group, fields in TINY.items():
        pairs = fields.split()
        given += [f"--{group}.{field}={value}" for field, value in zip(pairs[::2], pairs[1::2], strict=True)]
    return fast(override(recipe_of(name), [*given, *words], program=name))


@pytest.mark.slow
def test_gpt2_124m_equals_gpt_2_and_trains(tmp_path):
    recipe = with_vocabulary(recipe_of("gpt2_124m"), 50_257)
    assert count_parameters(abstract_state(recipe).params) == GPT2.variants["gpt2"].parameters
    summary = train(tiny("gpt2_124m", tmp_path, "--model.position.max-length=16"), tmp_path / "run")
    assert summary.step == 4


@pytest.mark.slow
def test_llama_1b_equals_llama_3_2_and_trains_fully_and_with_lora(tmp_path):
    """By default the recipe trains a LoRA of the model in --init; --lora None trains all parameters."""
    whole = dataclasses.replace(with_vocabulary(recipe_of("llama_1b"), 128_256), lora=None)
    assert count_parameters(abstract_state(whole).params) == LLAMA.variants["llama-3.2-1b"].parameters
    kv_heads = "--model.attention.num-kv-heads=2"
    with pytest.raises(ConfigError, match="--init DIR"):
        train(tiny("llama_1b", tmp_path, kv_heads), tmp_path / "none")
    first = tmp_path / "whole"
    assert train(tiny("llama_1b", tmp_path, kv_heads, "--lora", "None"), first).step == 4
    lora = tiny("llama_1b", tmp_path, kv_heads, "--lora.rank=2")
    with jax.default_device(jax.devices()[3]):  # stands for an accelerator
        start = start_from(first, lora)
    assert {leaf.device for leaf in jax.tree.leaves(start.params)} == {jax.devices("cpu")[0]}  # host memory
    assert train(lora, tmp_path / "lora", start=start).step == 4


def test_none_disables_lora():
    recipe = recipe_of("llama_1b")
    assert override(recipe, ["--training.steps", "7", "--lora", "None"], program="x").lora is None
    assert override(recipe, ["--lora.rank", "7"], program="x").lora.targets == recipe.lora.targets
    with pytest.raises(ConfigError, match=r"--lora.*LoRA"):
        override(recipe, ["--lora.rank", "7", "--lora", "None"], program="x")
