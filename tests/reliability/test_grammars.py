"""The drawn schemas and expressions of the test of a server, and its table."""

import json

import pytest

from reliability import grammars


def test_the_same_seed_draws_the_same_cases():
    cases = [json.dumps(grammars.drawn(seed)) for seed in range(300)]
    assert cases == [json.dumps(grammars.drawn(seed)) for seed in range(300)]
    assert len(set(cases)) > 250
    assert all(any(word in case for case in cases) for word in ("guided_regex", "multipleOf", "allOf", "$ref", "{0,"))


def test_the_table_lists_results_per_grammar():
    result = {"date": "2026-01-02", "machine": "m", "versions": {"python": "3"}, "cases": 5000, "seed": 0}
    result |= {"seconds": 120, "outcomes": {"limit of time": 2, "text": 4998}, "longest": 2.34, "health": 0.05}
    result |= {"slowest_health": 0.2, "growth": 28e6, "children": 3, "child_size": 49e6, "child_growth": 21e6}
    text = grammars.table(result)
    assert "2 min" in text
    assert text.index("| text | 4,998 |") < text.index("| limit of time | 2 |")
    assert "The server grew by 28 MB; 3 processes compiled, of at most 49 MB" in text


def test_too_few_cases_are_an_error(capsys):
    with pytest.raises(SystemExit):
        grammars.main(["--cases", "200"])
    assert "--cases must be more than 200" in capsys.readouterr().err
