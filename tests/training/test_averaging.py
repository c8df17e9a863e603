"""Checkpoint averaging: the mean is correct, the result is a usable workdir, and the run itself is unchanged."""

import dataclasses
import hashlib
import json
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_recipes import change, record_drawn_run, short_recipe, text_recipe

from transformer.__main__ import main
from transformer.config import ConfigError, FeedForwardOptions, TransformerConfig
from transformer.data import Preferences, TokenizerConfig
from transformer.inference import open_model
from transformer.training._recipe import Origin, load_recipe
from transformer.training.lora import LoRA, flatten_adapted
from transformer.training.workdir._average import average
from transformer.training.workdir._checkpoint import CheckpointError, load_params
from transformer.training.workdir._manifest import CheckpointWarning
from transformer.training.workdir._runs import WorkdirError, load_reference, load_run, open_run

STEPS = (2, 5, 7, 11)


def write_run(folder, recipe=None, *, dtype=None, keep_last=4):
    """A workdir with a checkpoint at each of STEPS."""
    recipe = recipe or change(text_recipe(folder), checkpoint={"keep_last": keep_last})
    return record_drawn_run(recipe, folder / "run", STEPS, dtype=dtype)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run that keeps a moving average of its parameters; its first checkpoint has the lowest loss."""
    return write_run(tmp_path_factory.mktemp("kept"))


def content(folder):
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()}


def mean_of(*trees):
    return jax.tree.map(lambda *leaves: np.mean([np.asarray(leaf, np.float64) for leaf in leaves], 0), *trees)


def averages(workdir, steps):
    """The moving averages of the parameters that the run saved."""
    return [load_params(workdir, step=step, names="ema")[0] for step in steps]


def damage(workdir, step):
    path = max((workdir / "checkpoints" / str(step) / "state").rglob("*"), key=lambda path: path.stat().st_size)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def test_the_average_is_the_mean_of_the_last_checkpoints(kept, tmp_path):
    before = content(kept)
    done = average(kept, 3, tmp_path / "mean")
    assert done.steps == (5, 7, 11)
    run, newest = load_run(done.workdir), load_run(kept, "newest")
    assert run.step == 11
    assert run.fingerprint == newest.fingerprint is not None
    assert run.recipe == newest.recipe
    chex.assert_trees_all_close(run.params, mean_of(*averages(kept, STEPS[1:])), rtol=1e-6, atol=1e-6)
    chex.assert_trees_all_equal_shapes_and_dtypes(run.params, newest.params)
    assert content(kept) == before
    assert [path.name for path in tmp_path.iterdir()] == ["mean"]


def test_the_average_of_one_checkpoint_is_itself(kept, tmp_path):
    average(kept, 1, tmp_path / "mean")
    jax.tree.map(np.testing.assert_array_equal, load_run(tmp_path / "mean").params, load_run(kept, "newest").params)


@pytest.mark.programs(13, reason="the package merges the update of each kernel without jax.jit")
@pytest.mark.parametrize("base", [None, "int8"])
def test_the_reference_model_is_copied_for_evaluation(tmp_path, base):
    """A run on preferences compares the model with the frozen base of LoRA, which may be quantized."""
    pairs = [{"prompt": f"is {n} odd?", "chosen": " yes", "rejected": " no"} for n in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    data = Preferences(path=str(tmp_path / "pairs.jsonl"), max_length=20, tokenizer=TokenizerConfig(kind="char"))
    recipe = short_recipe(
        "pairs", TransformerConfig(d_model=6, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8)), data
    )
    origin = Origin(source="somewhere", model="GPT-2", fingerprint="0" * 64)
    recipe = dataclasses.replace(recipe, lora=LoRA(rank=2, base=base), origin=origin)
    workdir = write_run(tmp_path, recipe)
    done = load_run(average(workdir, 2, tmp_path / "mean").workdir)
    reference = load_reference(done.recipe, tmp_path / "mean", done.step)
    expected = flatten_adapted(load_reference(load_recipe(workdir), workdir, STEPS[-1]))
    chex.assert_trees_all_equal(reference, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(reference, done.params)


def test_every_command_opens_an_average(kept, tmp_path):
    """No option is needed: its only checkpoint is also the best one."""
    average(kept, 2, tmp_path / "mean")
    opened = open_model(tmp_path / "mean")
    assert opened.tokenizer.state() == open_model(kept).tokenizer.state()
    assert opened.place() == {"workdir": str(tmp_path / "mean"), "step": 11}


def test_half_floats_are_summed_in_float32(tmp_path):
    workdir = write_run(tmp_path, dtype=jnp.bfloat16)
    params = load_run(average(workdir, 4).workdir).params
    wanted = jax.tree.map(lambda leaf: leaf.astype(np.float32).astype(jnp.bfloat16), mean_of(*averages(workdir, STEPS)))
    jax.tree.map(np.testing.assert_array_equal, params, wanted)
    assert jax.tree.leaves(params)[0].dtype == jnp.bfloat16


def test_with_lora_the_merged_parameters_are_averaged(tmp_path):
    """The LoRA factors must not be averaged: the product of two means is not the mean of two products."""
    recipe = dataclasses.replace(text_recipe(tmp_path), lora=LoRA(rank=2))
    workdir = write_run(tmp_path, change(recipe, training={"ema_decay": None}, checkpoint={"keep_last": 4}))
    run = load_run(average(workdir, 4).workdir)
    assert run.recipe.lora is None
    merged = [load_run(workdir, step).params for step in STEPS]
    chex.assert_trees_all_close(run.params, mean_of(*merged), rtol=1e-5, atol=1e-5)


# Errors


def test_reports_too_few_checkpoints(kept, tmp_path):
    with pytest.raises(CheckpointError, match=r"5.*4.*\(2.*5.*7.*11\).*--checkpoint.keep-last 5"):
        average(kept, 5, tmp_path / "mean")
    assert not list(tmp_path.iterdir())
    (tmp_path / "recipe.json").write_text((kept / "recipe.json").read_text())
    with pytest.raises(FileNotFoundError, match="No checkpoint in"):
        average(tmp_path, 2)


def test_a_damaged_checkpoint_is_named_and_skipped(kept, tmp_path):
    workdir = shutil.copytree(kept, tmp_path / "run")
    damage(workdir, 7)
    with pytest.warns(CheckpointWarning, match=r"/7/state/.*SHA-256"):
        assert average(workdir, 3).steps == (2, 5, 11)
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(CheckpointError, match=r"4.*1.*/7/state/"),
    ):
        average(workdir, 4)


def test_a_damaged_average_is_not_opened(kept, tmp_path):
    average(kept, 2, tmp_path / "mean")
    damage(tmp_path / "mean", 11)
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        load_run(tmp_path / "mean")


def test_only_an_earlier_average_is_replaced(kept, tmp_path):
    average(kept, 2, tmp_path / "mean")
    (tmp_path / "mean" / "hypotheses.test.txt").touch()
    assert average(kept, 3, tmp_path / "mean").steps == (5, 7, 11)
    assert not (tmp_path / "mean" / "hypotheses.test.txt").exists()
    assert json.loads((tmp_path / "mean" / "average.json").read_text()) == {"workdir": str(kept), "steps": [5, 7, 11]}
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").touch()
    for place in (tmp_path / "mine", tmp_path / "mine" / "precious", kept):
        with pytest.raises(ConfigError, match="is not an earlier average, so it is not overwritten"):
            average(kept, 2, place)
    with pytest.raises(ConfigError, match="already is an average of checkpoints"):
        average(tmp_path / "mean", 2)


def test_a_failure_keeps_the_existing_average(kept, tmp_path, monkeypatch):
    average(kept, 2, tmp_path / "mean")
    before = content(tmp_path)
    monkeypatch.setattr("transformer.training.workdir._average.sync_tree", lambda path: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        average(kept, 3, tmp_path / "mean")
    assert content(tmp_path) == before


def test_no_run_resumes_from_an_average(kept, tmp_path):
    average(kept, 2, tmp_path / "mean")
    with pytest.raises(WorkdirError, match="--init"):
        open_run(load_run(kept, "newest").recipe, tmp_path / "mean", say=print)


def test_warns_about_a_checkpoint_kept_for_its_loss(tmp_path):
    workdir = write_run(tmp_path, keep_last=3)
    with pytest.warns(
        UserWarning, match=r"keeps its last 3 .*; of the 4 averaged, step 2 was kept because of its eval loss"
    ):
        average(workdir, 4)


# The command line


def test_the_command_writes_an_average(kept, tmp_path, capsys):
    words = ["average", str(kept), "--last", "2", "--to", str(tmp_path / "mean")]
    assert main(words) == 0
    assert capsys.readouterr().out == f"averaged 2 checkpoints of {kept} (steps 7, 11): {tmp_path / 'mean'}\n"
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"workdir": str(tmp_path / "mean"), "of": str(kept), "steps": [7, 11]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--last", "0"), "--last must be at least 1, got 0"),
        (("--last", "9"), "cannot average 9 checkpoints: .* has 4 checkpoints"),
        ((), "--last is missing"),
    ],
)
def test_reports_invalid_arguments(kept, words, message, capsys):
    assert main(["average", str(kept), *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: .*{message}", err)


def test_the_default_output_is_next_to_the_run(kept, tmp_path, monkeypatch):
    workdir = shutil.copytree(kept, tmp_path / "run")
    assert average(workdir, 2).workdir == tmp_path / "run-average-2"
    monkeypatch.chdir(workdir)
    assert average(".", 3).workdir == tmp_path / "run-average-3"
