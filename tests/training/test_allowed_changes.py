"""`--allow-change`: a resumed run may change what keeps the shapes of the parameters and the order of the data."""

import shutil

import chex
import jax
import numpy as np
import pytest
from training_recipes import change, short_recipe, text_recipe, tiny_recipe

from transformer.config import TransformerConfig
from transformer.data import NumberWords, prepare
from transformer.training._loop import train
from transformer.training._optimizers import DIRECTIONS, learning_rates
from transformer.training._recipe import Change, difference, load_recipe
from transformer.training._serial import flatten
from transformer.training._state import abstract_state
from transformer.training.metrics._writer import read_metrics
from transformer.training.workdir._provenance import (
    BATCH_SIZE,
    OPTIMIZATION,
    SWITCHES,
    WorkdirError,
    allowable,
    how_to_extend,
    moved,
    schedule_change,
)
from transformer.training.workdir._runs import load_run

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


def recipe_of(folder, **groups):
    """Return a recipe of twelve steps that is evaluated quickly; `groups` as in `change`."""
    quick = {"every": 12, "batches": 1, "samples": 0, "sample_tokens": 1}
    return change(text_recipe(folder, evaluation=quick), **groups)


@pytest.fixture(scope="module")
def finished(folder):
    train(recipe_of(folder), folder / "whole")
    return folder / "whole"


@pytest.fixture
def workdir(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def test_changes_are_reported_used_and_recorded(folder, workdir, capsys):
    changed = {"optimizer": {"learning_rate": 0.25, "schedule": "constant"}, "training": {"steps": 15}}
    recipe = recipe_of(folder, **changed, data={"batch_size": 6}, logging={"every": 1})
    with pytest.raises(WorkdirError, match=r"--allow-change \(in.*allow_change=True\)"):
        train(recipe, workdir)
    assert train(recipe, workdir, allow_change=True).step == 15
    said = capsys.readouterr().out
    for field in ("optimizer.learning_rate: 0.01 -> 0.25", "data.batch_size: 4 -> 6", "training.steps: 12 -> 15"):
        assert f"changed since the previous training run: {field}" in said
    lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "train/learning_rate" in line]
    rates = {line["step"]: line["train/learning_rate"] for line in lines}
    assert [rates[step] for step in (13, 14, 15)] == pytest.approx([0.25] * 3)
    assert load_recipe(workdir).optimizer.learning_rate == 0.25
    for step in (12, 15, "best", "newest"):  # checkpoints from before and after the change
        assert load_run(workdir, step).step
    assert train(recipe, workdir).finished, "the newest checkpoint has the new values, so no flag is needed"


def test_a_run_that_ended_before_its_next_checkpoint_explains_how_to_resume(folder, workdir, monkeypatch):
    recipe = recipe_of(folder, optimizer={"learning_rate": 0.25}, training={"steps": 15})

    def end(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("transformer.training._loop._Training.run", end)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, workdir, allow_change=True)
    with pytest.raises(WorkdirError, match=r"recipe\.json.*learning_rate.*--allow-change"):
        train(recipe, workdir)
    assert train(recipe, workdir, allow_change=True).step == 15


@pytest.mark.parametrize(
    ("groups", "named"),
    [
        ({"model": {"feed_forward.d_ff": 7}}, "model.feed_forward.d_ff: 5 -> 7"),
        ({"training": {"seed": 1}}, "training.seed: 0 -> 1"),
        ({"optimizer": {"name": "lion"}}, "optimizer.name: 'adamw' -> 'lion'"),
        ({"optimizer": {"clip_norm": None}}, "optimizer.clip_norm: 1.0 -> None"),
        ({"training": {"ema_decay": None}}, "training.ema_decay: 0.9 -> None"),
        ({"data": {"sequence_length": 9}, "optimizer": {"learning_rate": 0.5}}, "data.sequence_length: 8 -> 9"),
    ],
)
def test_changes_of_shapes_and_data_order_are_rejected_by_name(groups, named, folder, workdir):
    with pytest.raises(WorkdirError) as caught:
        train(recipe_of(folder, **groups), workdir, allow_change=True)
    assert named in str(caught.value)
    assert "--allow-change does not accept them" in str(caught.value)
    assert "learning_rate" not in str(caught.value)


def test_the_message_names_changes_accepted_by_the_flag(folder, workdir):
    recipe = recipe_of(folder, model={"feed_forward.d_ff": 7}, optimizer={"learning_rate": 0.5})
    with pytest.raises(WorkdirError, match=r"--allow-change.*optimizer\.learning_rate"):
        train(recipe, workdir)
    with pytest.raises(WorkdirError) as caught:
        train(recipe_of(folder, model={"feed_forward.d_ff": 7}), workdir)
    assert "--allow-change" not in str(caught.value)


OTHER = {"schedule": "cosine", "embedding_gradient_dtype": "bfloat16", "decay_embeddings": True}
"""other values of the fields that are no numbers"""


@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_accepted_fields_keep_the_training_state(name):
    """The same tree of the same shapes for every optimizer, so that the checkpoint fits."""
    free = name == "schedule_free_adamw"  # fixes the schedule, and has no other average
    fields = {field for field in OPTIMIZATION if not (free and field in ("optimizer.schedule", "training.ema_decay"))}
    old = tiny_recipe(optimizer={"warmup_steps": 2, "schedule": "constant"})
    averaged = {} if free else {"ema_decay": 0.5}
    old = change(old, execution={"attention": "reference"}, training=averaged, optimizer={"name": name})
    values, groups = flatten(old), {}
    for field in fields:
        group, _, rest = field.partition(".")
        value = OTHER.get(rest, 0.25 if isinstance(values[field], float) else 3)
        groups.setdefault(group, {})[rest] = value
    new = change(old, **groups)
    must_match, _ = difference(old, new)
    assert {one.field for one in must_match} == fields
    assert all(allowable(one, new) for one in must_match)
    chex.assert_trees_all_equal_shapes_and_dtypes(abstract_state(old), abstract_state(new))


@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_changes_the_training_state(field):
    """This is why turning it on or off is refused."""
    old = tiny_recipe(ema_decay=0.5)
    group, _, rest = field.partition(".")
    new = change(old, **{group: {rest: None if rest != "weight_decay" else 0.0}})
    assert not allowable(difference(old, new)[0][0], new)
    before, after = (jax.tree.structure(abstract_state(recipe)) for recipe in (old, new))
    assert before != after


@pytest.mark.parametrize(("size", "new_size"), [(4, 6), (6, 4), (3, 7)])
def test_a_new_batch_size_continues_with_the_next_rows(size, new_size, folder):
    def dataset(batch_size):
        recipe = recipe_of(folder, data={"batch_size": batch_size})
        return recipe, prepare(recipe.data).train_batches(seed=5)

    def rows(batches, count):
        return np.concatenate([next(batches)["tokens"] for _ in range(count)])

    old, batches = dataset(size)
    seen = rows(batches, 6)
    new, resumed = dataset(new_size)
    resumed.set_state(moved(batches.get_state(), old, new))
    following = rows(resumed, 3)
    whole = rows(dataset(2)[1], (len(seen) + len(following) + 1) // 2)
    start = len(seen) // new_size * new_size  # fewer than one batch of rows is repeated
    np.testing.assert_array_equal(seen, whole[: len(seen)])
    np.testing.assert_array_equal(following, whole[start : start + len(following)])


def test_batch_size_of_other_data_kinds_cannot_change():
    """Batches by tokens are planned for the whole epoch, so that their order depends on their size."""
    for fields in ({"batch_tokens": 64}, {"packed_length": 8, "batch_tokens": 512}):
        old = short_recipe("pairs", TransformerConfig(d_model=6, num_heads=3, num_layers=1), NumberWords(**fields))
        assert not allowable(Change(BATCH_SIZE, 8, 4), old)


def decaying(schedule="cosine", steps=12, **optimizer):
    """Return a recipe whose learning rate decays until the last step."""
    optimizer = {"schedule": schedule, "warmup_steps": 3, "learning_rate": 0.5, "final_fraction": 0.25} | optimizer
    return tiny_recipe(optimizer=optimizer, steps=steps)


def changes(old, new, step):
    must_match, may_change = schedule_change(old, new, step, *difference(old, new))
    return [one.field for one in must_match], [one.field for one in may_change]


@pytest.mark.programs(40, reason="each schedule is computed in a program of its own")
@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant", "rsqrt", "noam"])
@pytest.mark.parametrize("step", [1, 3, 9, 12])
def test_more_steps_are_allowed_if_past_learning_rates_are_unchanged(schedule, step):
    """The reference: the rates of both recipes at all updates that are done."""
    old, new = decaying(schedule), decaying(schedule, steps=24)
    done = range(step)
    same = learning_rates(old, *done) == learning_rates(new, *done)
    must_match, may_change = changes(old, new, step)
    assert (must_match, may_change) == (([], ["training.steps"]) if same else (["training.steps"], []))
    assert same == (schedule in ("constant", "rsqrt", "noam") or step <= 3 or (schedule == "wsd" and step == 9))


def test_the_end_of_the_decay_may_be_given_explicitly():
    """`decay_steps` that equals the former number of steps changes nothing, with or without more steps."""
    for steps in (12, 24):
        must_match, may_change = changes(decaying(), decaying(steps=steps, decay_steps=12), 12)
        assert must_match == []
        assert "optimizer.decay_steps" in may_change
    assert changes(decaying(decay_steps=12), decaying(steps=12), 12) == ([], ["optimizer.decay_steps"])
    assert changes(decaying(), decaying(decay_steps=15), 12) == (["optimizer.decay_steps"], [])


@pytest.mark.slow
@pytest.mark.programs(24, reason="three runs of two recipes, and each schedule is computed in a program of its own")
def test_a_finished_run_is_extended_only_with_a_known_learning_rate(folder, tmp_path, capsys):
    """The error has both rates and the option that keeps the schedule; the option and the flag have this effect."""
    optimizer = {
        "schedule": "cosine",
        "warmup_steps": 3,
        "learning_rate": 0.5,
        "final_fraction": 0.25,
        "decay_steps": None,
    }
    recipe = recipe_of(folder, optimizer=optimizer)
    train(recipe, tmp_path / "run")
    capsys.readouterr()
    train(recipe, tmp_path / "run", command="CMD")
    said = capsys.readouterr().out
    longer = change(recipe, training={"steps": 24}, logging={"every": 1})
    before, after = learning_rates(recipe, 11)[0], learning_rates(longer, 12)[0]
    kept = f"with the last learning rate, {before:.3g}:\n  CMD --training.steps 24 --optimizer.decay-steps 12\n"
    assert kept in said
    assert f"To decay again, from a learning rate of {after:.3g}:\n  CMD --training.steps 24 --allow-change\n" in said

    numbers = rf"was {before:.3g} at step 12 and becomes {after:.3g}"
    message = (
        rf"training\.steps: 12 -> 24 \(the learning rate {numbers}.*--optimizer\.decay-steps 12 keeps.*--allow-change"
    )
    with pytest.raises(WorkdirError, match=message):
        train(longer, tmp_path / "run")
    for name, options in {"kept": {"optimizer": {"decay_steps": 12}}, "risen": {}}.items():
        workdir = shutil.copytree(tmp_path / "run", tmp_path / name)
        assert train(change(longer, **options), workdir, allow_change=name == "risen").step == 24
        lines = [line for line in read_metrics(workdir / "metrics.jsonl") if "train/learning_rate" in line]
        rates = {line["step"]: line["train/learning_rate"] for line in lines}
        assert rates[13] == pytest.approx(before if name == "kept" else after)
    assert f"training.steps: 12 -> 24 (the learning rate {numbers}" in capsys.readouterr().out


def test_a_rate_of_zero_is_not_proposed():
    recipe = decaying(final_fraction=0.0)
    said = how_to_extend("CMD", recipe)
    assert said.startswith("The last learning rate is 0. To train it longer, from a learning rate of 0.")
    assert said.endswith("\n  CMD --training.steps 24 --allow-change")
    assert how_to_extend("CMD", decaying("constant")).endswith("rate of 0.5 on:\n  CMD --training.steps 24")
