"""Tests of the picture of forecasts."""

import numpy as np
import pytest

from transformer.viz import _forecasts as module


def drawn(tmp_path, monkeypatch, windows=2, **options):
    """Return the figure of random windows with three channels."""
    kept = []
    monkeypatch.setattr(module, "save", lambda figure, path: kept.append(figure))
    past, future, forecast = (np.random.default_rng(0).normal(size=(windows, n, 3)) for n in (8, 4, 4))
    module.forecast_picture(past, future, forecast, ["a", "b", "c"], tmp_path / "x.png", **options)
    return kept[0], past, future, forecast


@pytest.mark.parametrize("names", [(), ("first", "last")])
def test_the_picture_and_each_window_have_a_title(tmp_path, monkeypatch, names):
    figure, *_ = drawn(tmp_path, monkeypatch, title="weather: forecasts", names=names)
    titles = [axes.get_title("left") for axes in figure.axes]
    assert figure.get_suptitle() == "weather: forecasts"
    assert titles == [*(names or ("window 1 of 2", "window 2 of 2")), "", "", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["a", "a", "b", "b", "c", "c"]


def test_plotted_lines_equal_the_values(tmp_path, monkeypatch):
    """Actual values and forecast start at the last input, in the window and channel of their axes."""
    figure, past, future, forecast = drawn(tmp_path, monkeypatch)
    for place, axes in enumerate(figure.axes):
        channel, window = divmod(place, 2)
        (x, before), (_, actual), (steps, predicted) = (line.get_data() for line in axes.lines)
        np.testing.assert_array_equal(before, past[window, :, channel])
        assert (x[-1], [*steps]) == (0, [0, 1, 2, 3, 4])
        np.testing.assert_array_equal(actual[1:], future[window, :, channel])
        np.testing.assert_array_equal(predicted[1:], forecast[window, :, channel])
        assert actual[0] == predicted[0] == before[-1]


def test_titles_do_not_overlap(tmp_path, monkeypatch):
    figure, *_ = drawn(tmp_path, monkeypatch, title="t" * 40)
    figure.canvas.draw()
    above, below = figure._suptitle.get_window_extent(), figure.axes[0].get_tightbbox()
    assert above.y0 >= below.y1


def test_wrong_names_are_an_error(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="expected one name for each of the 2 windows, got 1"):
        drawn(tmp_path, monkeypatch, names=["first"])
