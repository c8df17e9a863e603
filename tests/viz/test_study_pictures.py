import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.image import imread

from transformer.viz import _study_pictures as studies


def drawn(path, color):
    """Return the number of pixels near a color like "#3b6fb6"."""
    pixels = imread(path)[..., :3]
    wanted = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(pixels - wanted).max(-1) < 0.05).sum())


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "picture.png"


def test_draws_the_scale_study(path):
    studies.scale_picture([4, 16], {"without": [4.0, 16.0], "with": [1.0, 1.0]}, {"a": [0.2, 0.1], "b": [1, 1]}, path)
    assert imread(path).shape[2] == 4
    assert drawn(path, studies.RED) > 300
    assert drawn(path, studies.BLUE) > 300
    assert not plt.get_fignums()  # no global state


def test_draws_the_position_study(path):
    curve = np.cos(np.arange(2_001) / 100)
    panels = {"First": {"a": curve}, "Second": {"b": curve, "c": curve / 2, "e": curve / 4}, "Third": {"d": curve}}
    studies.positions_picture(panels, {4: curve}, 0.95, path)
    assert drawn(path, studies.BLUE) > 1_000
    assert drawn(path, studies.RED) > 500
    assert drawn(path, studies.COLORS[2]) > 300


def test_draws_the_memory_study(path):
    studies.memory_picture([8, 16], {"whole": [2**20, 2**22], "blocks": [2**20, 2**21]}, {"plain": 0.5}, path)
    assert drawn(path, studies.RED) > 100
    bars = drawn(path, studies.BLUE)
    studies.memory_picture([8, 16], {"whole": [2**20, 2**22], "blocks": [2**20, 2**21]}, {"plain": 0.1}, path)
    assert 300 < drawn(path, studies.BLUE) < bars / 3


def test_draws_a_curve_in_groups():
    """Every distance from 1 on is in exactly one group; the mean of a group is between its minimum and maximum."""
    curve = np.random.default_rng(0).normal(size=5_003)
    places, low, mean, high = studies._thinned(curve, points=40)
    assert places[0] == 1
    assert (np.diff(places) > 0).all()
    assert low.min() == curve[1:].min()
    assert high.max() == curve[1:].max()
    assert ((low <= mean) & (mean <= high)).all()
    np.testing.assert_allclose(mean[0], curve[1])
    straight = studies._thinned(np.arange(5_003.0), points=40)
    np.testing.assert_allclose(straight[0], straight[2])
