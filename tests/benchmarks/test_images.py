"""The comparison of image preprocessing and embedding: turns, medians and ratios."""

from benchmarks.images import row, timed


def test_libraries_alternate_and_the_first_round_is_not_counted():
    calls = []
    seconds = timed({"ours": lambda: calls.append("ours"), "peer": lambda: calls.append("peer")}, turns=2)
    assert calls == ["ours", "peer"] * 3
    assert {name: len(values) for name, values in seconds.items()} == {"ours": 2, "peer": 2}


def test_a_ratio_above_1_means_this_package_is_faster():
    found = row("work", {"ours": [1.0, 2.0, 9.0], "peer": [3.0, 3.0, 4.0]}, images=10)
    assert found == {"work": "work", "ours_ms": 200.0, "peer_ms": 300.0, "ratio": 1.5, "ratio_of_fastest": 3.0}
