"""Time series: contents of windows, standardization with training steps, and training, resuming and evaluating a
forecaster.
"""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from training_recipes import assert_equals_resumed_run, change, six_steps

from transformer.config import ConfigError, FeedForwardOptions, Series, TransformerConfig
from transformer.data import ETTh1, SeriesFile, prepare
from transformer.data._pipeline import check_batch
from transformer.data._series import Series as Steps
from transformer.data._series import SeriesDataset, from_model
from transformer.inference import open_model
from transformer.nn._sharding import ParallelConfig
from transformer.nn.models import Forecaster
from transformer.training._flops import step_flops
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import from_json, to_json
from transformer.training._start import Start
from transformer.training._step import make_eval_step
from transformer.training.metrics._summary import read_summary
from transformer.training.plan._measurement import made_up_batch
from transformer.training.tasks._evaluation import evaluate_loss
from transformer.training.tasks._losses import absolute_error, squared_error
from transformer.training.tasks._numbers import repetition_errors
from transformer.training.workdir._runs import WorkdirError, load_run, open_run

STEPS, CONTEXT, HORIZON = 120, 12, 5


def waves(steps=STEPS):
    """Return two channels with different scales and periods."""
    time = np.arange(steps)
    return np.stack([3 + np.sin(time / 3), 100 + 20 * np.cos(time / 5)], 1)


def write_csv(path, values):
    rows = [f"day {step},{','.join(map(str, row))}" for step, row in enumerate(values)]
    path.write_text("date,low,high\n" + "\n".join(rows) + "\n")
    return str(path)


def series_recipe(folder, **groups):
    """Return a recipe of six steps with dropout, parameter averaging and an intermediate checkpoint."""
    path = folder / "waves.csv"
    if not path.exists():
        write_csv(path, waves())
    sizes = {"context_length": CONTEXT, "horizon": HORIZON}
    series = Series(channels=2, patch_length=4, patch_stride=4, **sizes)
    model = TransformerConfig(
        d_model=4, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5), dropout_rate=0.2, input=series
    )
    data = SeriesFile(path=str(path), batch_size=8, eval_batch_size=16, **sizes)
    return change(six_steps("waves", model, data, checkpoint={"every": 3}), **groups)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder and recipe of a finished run."""
    folder = tmp_path_factory.mktemp("series")
    recipe = series_recipe(folder)
    train(recipe, folder / "run")
    return folder, recipe


def dataset(values, splits=None, **fields):
    splits = splits or {"train": (0, 70), "validation": (70, 90), "test": (90, len(values))}
    config = SeriesFile(
        path="unread.csv", **({"context_length": CONTEXT, "horizon": HORIZON, "batch_size": 4} | fields)
    )
    return SeriesDataset(config, Steps(values, ("low", "high"), splits))


def test_squared_and_absolute_errors_equal_their_definition():
    random = np.random.default_rng(0)
    forecast, targets = random.normal(size=(2, 3, 5, 2)).astype(np.float32)
    weights = np.array([1.0, 0.0, 0.5], np.float32)
    targets[1] = np.nan  # of weight 0
    arrays = forecast, targets, weights
    total, weight = jax.device_get(jax.jit(squared_error)(*arrays))
    errors = (forecast - targets)[[0, 2]]
    np.testing.assert_allclose(total, (errors**2).sum((1, 2)) @ [1.0, 0.5], rtol=1e-6)
    for error in (lambda *arrays: squared_error(*arrays)[0], absolute_error):
        slope = np.asarray(jax.jit(jax.grad(error))(*arrays))
        assert np.isfinite(slope).all(), "a row of weight 0 must not influence the gradient"
        assert (slope[1] == 0).all()
    assert weight == 1.5 * 10
    magnitudes = np.abs(errors).sum((1, 2)) @ [1.0, 0.5]
    np.testing.assert_allclose(jax.jit(absolute_error)(*arrays), magnitudes, rtol=1e-6)


def test_training_windows_contain_no_held_out_values():
    """Windows and standardization of the training split do not depend on later steps."""
    values = waves()
    other = values.copy()
    other[70:] = 1e6
    one, two = dataset(values), dataset(other)
    assert (one.config.mean, one.config.std) == (two.config.mean, two.config.std)
    np.testing.assert_allclose(one.config.mean, values[:70].mean(0))
    np.testing.assert_allclose(one.config.std, values[:70].std(0))
    rows = np.arange(one._size("train"))
    for name in ("values", "targets"):
        np.testing.assert_array_equal(*(each._assemble("train", rows)[name] for each in (one, two)))
    assert one.fingerprint != two.fingerprint


@pytest.mark.parametrize(("split", "first", "last"), [("validation", 70, 90), ("test", 90, STEPS)])
def test_every_held_out_window_is_counted_once_and_looks_back(split, first, last):
    values = np.stack([np.arange(STEPS), np.arange(STEPS) % 7], 1).astype(float)
    data = dataset(values, eval_batch_size=7)
    starts, count = [], 0.0
    for batch in data.eval_batches(split):
        inside = batch["weights"] > 0
        count += batch["weights"].sum()
        past = from_model(data.config, batch["values"][inside])[..., 0]
        future = from_model(data.config, batch["targets"][inside])[..., 0]
        np.testing.assert_allclose(
            np.concatenate([past, future], 1), past[:, :1] + np.arange(CONTEXT + HORIZON), atol=1e-3
        )
        starts += list(np.rint(future[:, 0]).astype(int))
    assert starts == list(
        range(first, last - HORIZON + 1)
    )  # the input steps of the first window belong to the previous split
    assert count == len(starts)


def test_training_windows_end_before_the_held_out_steps():
    data = dataset(np.stack([np.arange(STEPS), np.arange(STEPS) % 7], 1).astype(float))
    assert data._size("train") == 70 - CONTEXT - HORIZON + 1
    last = data._assemble("train", np.array([data._size("train") - 1]))
    np.testing.assert_allclose(from_model(data.config, last["targets"])[0, -1, 0], 69, atol=1e-3)


def test_resuming_with_other_columns_is_an_error(trained, tmp_path):
    """Mean and standard deviation of the run belong to other columns."""
    folder, recipe = trained
    with pytest.raises(WorkdirError, match=r"data\.columns"):
        open_run(change(recipe, data={"columns": ("high",)}), folder / "run", say=print)


def test_reads_selected_columns_of_a_file(tmp_path):
    path = write_csv(tmp_path / "waves.csv", waves())
    sizes = {"context_length": CONTEXT, "horizon": HORIZON}
    data = prepare(SeriesFile(path=path, **sizes))
    assert data.config.columns == ("low", "high")  # dates are not numbers
    assert data.splits == ("train", "validation", "test")
    assert "2 channels (low, high)" in data.describe()
    one = prepare(SeriesFile(path=path, columns=("high",), **sizes))
    assert one.eval_batches()[0]["values"].shape == (256, CONTEXT, 1)
    given = prepare(SeriesFile(path=path, columns=("low", "high"), mean=(1.0, 2.0), std=(3.0, 4.0), **sizes))
    assert (given.config.mean, given.config.std) == ((1.0, 2.0), (3.0, 4.0))
    with pytest.raises(ValueError, match="has numeric data and no texts"):
        data.examples()


def test_a_quoted_cell_may_contain_line_breaks(tmp_path):
    sizes = {"context_length": CONTEXT, "horizon": HORIZON}
    plain = prepare(SeriesFile(path=write_csv(tmp_path / "plain.csv", waves()), **sizes))
    odd = Path(write_csv(tmp_path / "odd.csv", waves()))
    odd.write_text(odd.read_text().replace("day 1,", '"day\n1",').replace("day 2,", "day\u2028 2,"))
    assert prepare(SeriesFile(path=str(odd), **sizes)).fingerprint == plain.fingerprint


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("a,b\n1,2\n", {"columns": ("c",)}, "has no column 'c': its first line has a, b"),
        ("a,b\n1\n", {}, "line 2: expected 2 columns as in the first line, got 1"),
        ("a,b\n\n1,2\n1,\n", {}, "line 4: expected a number in column b, got ''"),
        ("a,b\n1,nan\n", {"columns": ("b",)}, r"got 'nan'"),
        ("a\nx\n", {}, "has no numeric column"),
        ("a,a\n1,2\n", {}, "has duplicate column names"),
        ("a,b\n1," + "2" * 200_000, {}, r"bad.csv"),
        ("a\n" + "1\n" * 50, {}, r"series_file"),
        ("a\n" + "".join(f"{n}\n" for n in range(50)), {"context_length": 40}, "the train steps of .* are too few"),
    ],
)
def test_an_invalid_series_file_is_an_error_with_a_reason(tmp_path, text, fields, message):
    (tmp_path / "bad.csv").write_text(text)
    config = SeriesFile(path=str(tmp_path / "bad.csv"), **({"context_length": 3, "horizon": 2} | fields))
    with pytest.raises(ValueError, match=message):
        prepare(config)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"horizon": 0}, r"horizon.*1.*got 0"),
        ({"columns": ("a", "a")}, "columns must all be different"),
        ({"columns": ("a",), "mean": (1.0,)}, "mean and std must be set together"),
        ({"columns": ("a",), "mean": (1.0,), "std": (0.0,)}, r"std.*0"),
        ({"validation_share": 0.6, "test_share": 0.5}, "must be below 1"),
        ({"path": ""}, "path must be a file name"),
    ],
)
def test_invalid_settings_name_the_field_to_change(fields, message):
    with pytest.raises(ConfigError, match=message):
        SeriesFile(**({"path": "x.csv"} | fields))


def test_numbers_that_are_not_finite_are_refused():
    batch = dataset(waves())._assemble("train", np.arange(3))
    check_batch(batch, None)
    batch["targets"][1, 2, 0] = np.inf
    with pytest.raises(ValueError, match=r"targets\[1.*2.*0\]"):
        check_batch(batch, None)


def test_a_run_stores_everything_a_forecast_needs(trained):
    folder, _ = trained
    run = load_run(folder / "run")
    assert isinstance(run.model, Forecaster)
    assert run.tokenizer is None
    assert not (folder / "run" / "tokenizer").exists()
    assert run.recipe.data.columns == ("low", "high")
    assert from_json(json.loads(json.dumps(to_json(run.recipe)))) == run.recipe
    forecast = jax.jit(run.model.apply)({"params": run.params}, np.zeros((1, CONTEXT, 2)))
    assert from_model(run.recipe.data, forecast).shape == (1, HORIZON, 2)
    assert (folder / "run" / "forecasts.png").stat().st_size > 10_000
    with pytest.raises(ConfigError, match="contains a Forecaster, which reads numeric data, not text"):
        open_model(folder / "run").tokenizer  # noqa: B018 - asking raises


def test_the_summary_reports_the_test_error_and_the_baseline(trained):
    """Compare the errors on all test windows with separately computed ones: of the model, and of repeating the last
    step.
    """
    folder, recipe = trained
    summary, run = read_summary(folder / "run"), load_run(folder / "run")
    data = prepare(recipe.data)
    batches = data.eval_batches("test")
    expected = evaluate_loss(jax.jit(make_eval_step(run.recipe)), run.params, batches)
    assert summary.split == "test"
    assert (summary.held_out.loss, summary.held_out.mae) == pytest.approx((expected.loss, expected.mae))
    windows = data._assemble("test", np.arange(data._size("test")))
    errors = windows["values"][:, -1:] - windows["targets"]
    assert summary.baseline.loss == pytest.approx((errors**2).mean())
    assert repetition_errors(batches).mae == pytest.approx(np.abs(errors).mean())
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"eval/loss", "eval/mae"} <= set().union(*lines)
    assert [line["test/mae"] for line in lines if "test/mae" in line] == [summary.held_out.mae]
    assert summary.eval_accuracy is None


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(trained, tmp_path):
    folder, recipe = trained
    assert_equals_resumed_run(folder / "run", recipe, 3, tmp_path / "stopped")


def test_evaluate_reports_forecast_errors(trained, capsys):
    from transformer.__main__ import main

    folder, _ = trained
    assert main(["evaluate", "run", str(folder / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    summary = read_summary(folder / "run")
    assert (told["split"], told["loss"]) == ("test", pytest.approx(summary.held_out.loss))
    assert told["mae"] == pytest.approx(summary.held_out.mae)
    assert "perplexity" not in told


def test_rejects_a_model_with_other_window_sizes(tmp_path):
    recipe = series_recipe(tmp_path, data={"horizon": HORIZON + 1})
    with pytest.raises(ConfigError, match=r"model\.input.*5 \(data.*6\)"):
        train(recipe, tmp_path / "run")
    there = recipe.model.replace(input=dataclasses.replace(recipe.model.series, channels=3))
    start = Start("other", "Forecaster", there, {}, tokenizer=None)
    said = r"has channels 3 \(data: 2\), horizon 5 \(data: 6\)\. Use as many columns as the model \(--data\.columns\)"
    with pytest.raises(ConfigError, match=said):
        open_run(recipe, tmp_path / "run", say=print, start=start)


def one_step(recipe, batch):
    placement = place(recipe)
    _, metrics = placement.train_step(placement.spread(placement.new_state()), batch)
    return [float(metrics[name]) for name in ("loss_sum", "weight", "grad_norm")]


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        (ParallelConfig(devices=4, fsdp=2), {}),
        pytest.param(ParallelConfig(kind="pmap", devices=4), {}, marks=pytest.mark.slow),
        pytest.param(ParallelConfig(devices=1), {"accumulation": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_step_over_devices_or_micro_batches_equals_one_device(tmp_path, parallel, training):
    """One row has weight 0."""
    recipe = series_recipe(tmp_path)
    recipe = dataclasses.replace(recipe, model=recipe.model.replace(dropout_rate=0.0))
    batch = {name: np.array(array) for name, array in next(prepare(recipe.data).train_batches(0)).items()}
    batch["weights"][3] = 0
    expected = one_step(recipe, batch)
    assert expected[1] == 7 * HORIZON * 2
    changed = change(dataclasses.replace(recipe, parallel=parallel), training=training)
    np.testing.assert_allclose(one_step(changed, batch), expected, rtol=1e-5)


def test_operation_counts_equal_a_hand_calculation(tmp_path):
    """There are 3 patches of 4 steps in each of 8 x 2 channels; the output layer reads each channel once."""
    recipe = series_recipe(tmp_path)
    layer = 4 * 4 * 4 + 2 * 4 * 5
    each = 3 * (4 * 4 + layer) + 3 * 4 * HORIZON
    flops = step_flops(recipe)
    assert flops.matrices == 3 * 2 * 16 * each
    assert flops.attention == 3 * 2 * 16 * 9 * (4 + 4)
    assert made_up_batch(recipe)["values"].shape == (8, CONTEXT, 2)


@pytest.mark.slow
def test_a_forecaster_learns_two_waves(tmp_path):
    """The error is much smaller than that of repeating the last step."""
    recipe = series_recipe(tmp_path, training={"steps": 150}, evaluation={"every": 50})
    write_csv(tmp_path / "waves.csv", waves(600))
    recipe = dataclasses.replace(recipe, model=recipe.model.replace(dropout_rate=0.0, d_model=16))
    summary = train(recipe, tmp_path / "run")
    assert summary.held_out.loss < summary.baseline.loss / 4


def test_etth1_is_split_as_in_the_literature(test_data, tmp_path):
    config = ETTh1(manual_dir=str(test_data / "data" / "manual"), data_dir=str(tmp_path))
    data = prepare(config)
    with pytest.raises(ValueError, match=r"^etth1 has no column 'OIL': expected some of HUFL, "):
        prepare(dataclasses.replace(config, columns=("OIL",)))
    assert [data._size(split) for split in data.splits] == [8033, 2785, 2785]
    assert data.config.columns == ("HUFL", "HULL", "MUFL", "MULL", "LUFL", "LULL", "OT")
    baseline = repetition_errors(data.eval_batches("test"))
    # Zeng et al. 2022, arXiv 2205.13504, table 2, "Repeat": 1.295 and 0.713
    assert (baseline.loss, baseline.mae) == pytest.approx((1.295, 0.713), abs=1e-3)
