"""The calculations of benchmarks/startup.py; the measurements are not tested."""

import sys

import pytest

from benchmarks.startup import OURS, PEER, beyond_peer, contributors, medians, run_python, table

LOG = """import time: self [us] | cumulative | imported package
import time:       700 |        700 |     numpy.core
import time:      1100 |       1800 |   jax._src
import time:       300 |       2100 | jax
a warning in between
import time:       170 |        170 |     flax.core
import time:       130 |        130 |       jax.experimental
import time:       230 |        530 |   flax.linen
import time:        50 |        580 | transformer.nn._masks
import time:        20 |        600 | transformer
"""


def test_contributors_are_packages_after_jax():
    """jax belongs to the peer, so only modules imported after it count, each for its own package."""
    expected = {"flax": 400e-6, "jax": 130e-6, "transformer": 70e-6}
    found = contributors(LOG)
    assert list(found) == [(name, pytest.approx(seconds)) for name, seconds in expected.items()]
    assert sum(seconds for _, seconds in found) == pytest.approx(600e-6)


def test_rejects_a_log_without_jax():
    with pytest.raises(ValueError, match="expected a line for the import of jax, got 0 lines"):
        contributors("nothing was imported")


def test_parses_the_import_time_log_of_python():
    log = run_python("-X", "importtime", "-c", "import json; import wave")
    found = contributors(log, after="json")
    assert {"wave"} <= {name for name, _ in found} <= sys.stdlib_module_names
    assert all(seconds >= 0 for _, seconds in found)


def test_medians_are_per_variant_and_per_clock():
    walls, cpus = [7.0, 2.0, 3.0], [1.0, 5.0, 4.0]
    rounds = [{"a": (wall, cpu), "b": (2 * wall, 0.0)} for wall, cpu in zip(walls, cpus, strict=True)]
    assert medians(rounds) == {"a": (3.0, 4.0), "b": (6.0, 0.0)}


def test_differences_are_taken_within_each_round():
    """Each round is compared with the peer of the same round, because the machine may be busy in one of them."""
    rounds = [
        {PEER: (1.0, 0.5), OURS: (1.5, 0.75)},
        {PEER: (8.0, 0.5), OURS: (8.5, 1.0)},
        {PEER: (2, 1), OURS: (3, 1.5)},
    ]
    assert medians(map(beyond_peer, rounds)) == {PEER: (0.0, 0.0), OURS: (0.5, 0.5)}


def test_the_table_reports_the_added_time():
    head, peer, ours = table({PEER: (0.7, 0.5), OURS: (1.1, 0.8)}, {PEER: (0.0, 0.0), OURS: (0.4, 0.31)}).splitlines()
    assert head.split() == ["wall", "s", "CPU", "s", "more", "than", "jax:", "wall", "s", "CPU", "s"]
    assert peer.removeprefix(PEER).split() == ["0.700", "0.500", "0.000", "0.000"]
    assert ours.removeprefix(OURS).split() == ["1.100", "0.800", "0.400", "0.310"]
