import json

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.image import imread

from transformer.viz import _curves as curves
from transformer.viz._curves import compare_losses, loss_curve


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def drawn(path, color):
    """Return the number of pixels near a color like "#3b6fb6"."""
    pixels = imread(path)[..., :3]
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(pixels - wanted).max(-1) < 0.05).sum())


def run(count):
    train = [{"step": 5 * i, "train/loss": 1 + 3 / i, "train/grad_norm": 1.0} for i in range(1, count)]
    return train + [{"step": 5 * i, "eval/loss": 1.2 + 3 / i} for i in range(1, count, max(count // 8, 1))]


@pytest.mark.parametrize("count", [3, 30, 500])
def test_both_losses_are_drawn(tmp_path, count):
    path = tmp_path / "new" / "loss.png"
    loss_curve(write(tmp_path / "m.jsonl", run(count)), path, title="A run")
    assert imread(path).shape == (720, 1200, 4)
    assert drawn(path, curves.BLUE) > 300
    assert drawn(path, curves.RED) > 300
    assert not plt.get_fignums()  # no global state


@pytest.mark.parametrize(("name", "present", "absent"), [("train/loss", "BLUE", "RED"), ("eval/loss", "RED", "BLUE")])
def test_one_loss_is_enough(tmp_path, name, present, absent):
    records = [{"step": step, name: 3.0 / step} for step in range(1, 9)]
    loss_curve(write(tmp_path / "m.jsonl", records), tmp_path / "loss.png")
    assert drawn(tmp_path / "loss.png", getattr(curves, present)) > 300
    assert drawn(tmp_path / "loss.png", getattr(curves, absent)) == 0


def test_infinite_losses_do_not_hide_the_others(tmp_path):
    records = run(30)
    records[3]["train/loss"], records[5]["train/loss"], records[-1]["eval/loss"] = "Infinity", "NaN", "NaN"
    loss_curve(write(tmp_path / "m.jsonl", records), tmp_path / "loss.png")
    assert drawn(tmp_path / "loss.png", curves.BLUE) > 300


def axes_of(tmp_path, monkeypatch, records):
    """Return the axes that `loss_curve` draws for these records."""
    kept = []
    monkeypatch.setattr(curves, "save", lambda figure, path: kept.append(figure.axes[0]))
    loss_curve(write(tmp_path / "m.jsonl", records), tmp_path / "loss.png")
    return kept[0]


@pytest.mark.parametrize(
    ("losses", "scale"),
    [
        ([4.0, 1.0, 0.01, 0.001], "log"),
        ([4.0, 1.0, 0.5, 0.41], "linear"),
        ([4.0, 1.0, 0.5, 0.4], "log"),  # exactly one decade
        ([4.0, 0.01, 0.0, 0.001], "log"),
        ([4.0, 0.01, -1.0], "linear"),  # the likelihood of a density may exceed 1
        ([-4.0, -9.0], "linear"),
        ([0.0, 0.0], "linear"),
        ([3.0], "linear"),
    ],
)
def test_a_loss_that_falls_by_decades_has_a_logarithmic_axis(tmp_path, monkeypatch, losses, scale):
    """Every loss is inside the axis, and on a logarithmic one the last losses are not on its edge."""
    axes = axes_of(tmp_path, monkeypatch, [{"step": i, "train/loss": loss} for i, loss in enumerate(losses, 1)])
    assert axes.get_yscale() == scale
    assert axes.get_ylabel() == "loss (nats per token, log scale)" if scale == "log" else "loss (nats per token)"
    low, high = axes.get_ylim()
    assert all(low <= loss <= high for loss in losses if loss or scale == "linear")
    if scale == "log":
        height = axes.transAxes.inverted().transform(axes.transData.transform((1, losses[-1])))[1]
        assert height > 0.03
        assert len(axes.get_yticks()) >= 3


def test_a_late_evaluation_is_visible_beside_a_high_first_loss(tmp_path, monkeypatch):
    records = [{"step": step, "train/loss": 5.0 * 0.9**step} for step in range(1, 101)]
    axes = axes_of(tmp_path, monkeypatch, [*records, {"step": 100, "eval/loss": 2e-3}, {"step": 50, "eval/loss": 0.1}])
    (line,) = [line for line in axes.lines if line.get_label().startswith("evaluation")]
    down = axes.transAxes.inverted().transform(axes.transData.transform(line.get_xydata()))[:, 1]
    assert abs(down[0] - down[1]) > 0.2, "a factor of 50 is a visible distance"


@pytest.mark.parametrize(("low", "high"), [(0.9, 11.0), (1e-4, 9.0), (3e-12, 50.0), (0.4, 4.2), (1e-300, 1.0)])
def test_ticks_of_a_logarithmic_axis(low, high):
    ticks = curves.log_ticks(low, high)
    assert 3 <= len(ticks) <= 16
    assert all(low <= tick <= high for tick in ticks)
    assert ticks == sorted(ticks)


def test_rejects_runs_without_losses(tmp_path):
    with pytest.raises(ValueError, match=r"train/loss.*eval/loss"):
        loss_curve(write(tmp_path / "m.jsonl", [{"step": 1, "train/loss": "NaN"}]), tmp_path / "loss.png")
    with pytest.raises(FileNotFoundError):
        loss_curve(tmp_path / "none.jsonl", tmp_path / "loss.png")


def test_the_running_mean_reaches_both_ends_and_keeps_a_line_straight():
    values = np.arange(11.0)
    mean = curves.smooth(values, 4)
    assert mean.shape == values.shape
    np.testing.assert_allclose(mean[2:9], values[2:9] - 0.5)
    np.testing.assert_allclose(curves.smooth(np.full(7, 3.0), 5), 3.0)
    assert (mean[0], mean[-1]) == (0.5, 9.0)


def test_compared_runs_have_distinct_colors_and_bounds(tmp_path):
    runs = {f"run {i}": [[step, 3 + i + 5 / step] for step in range(1, 40)] for i in range(2)}
    compare_losses(runs, tmp_path / "new" / "a.png", title="Two")
    assert drawn(tmp_path / "new" / "a.png", curves.COLORS[0]) > 300
    assert drawn(tmp_path / "new" / "a.png", curves.COLORS[1]) > 300
    assert drawn(tmp_path / "new" / "a.png", curves.COLORS[2]) == 0
    compare_losses(runs, tmp_path / "b.png", bounds={"least": 2.5}, title="Two")
    assert drawn(tmp_path / "b.png", curves.INK) > drawn(tmp_path / "new" / "a.png", curves.INK) + 500


def test_the_first_steps_do_not_hide_the_differences():
    runs = {"a": [[step, 2 + 90 / step**2] for step in range(1, 101)], "b": [[step, 2.1] for step in range(1, 101)]}
    low, high = curves._limits(runs, {"bound": 1.9})
    assert low < 1.9 < 2.1 < high < 3


@pytest.mark.parametrize(("runs", "message"), [({}, "no runs to plot"), ({"x": []}, "'x' has no losses")])
def test_rejects_an_empty_comparison(tmp_path, runs, message):
    with pytest.raises(ValueError, match=message):
        compare_losses(runs, tmp_path / "x.png")
