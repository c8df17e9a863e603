"""The texts that benchmarks/attention.py prints; the measurements are not tested."""

import pytest

from benchmarks.attention import bounds, stretches
from transformer.nn import kernels


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["reference"] * 5, "reference"),
        (
            ["reference", "reference", "query_chunked", "query_chunked", "blockwise"],
            "reference to 80, query_chunked to 128, blockwise",
        ),
        (
            ["query_chunked", "reference", "query_chunked", "query_chunked", "query_chunked"],
            "query_chunked to 64, reference to 80, query_chunked",
        ),
    ],
)
def test_adjacent_lengths_with_the_same_kernel_form_one_range(names, expected):
    assert stretches(names, [64, 80, 96, 128, 256]) == expected


def test_the_ranges_match_the_automatic_kernel_choice(monkeypatch):
    monkeypatch.setitem(kernels.FULL_MATRIX_SCORES, "cpu", 100 * 100)
    monkeypatch.setitem(kernels.QUERY_CHUNKED_SCORES, "cpu", 300 * 300)
    assert bounds("cpu") == "reference to 100, query_chunked to 300, blockwise"
    assert bounds("gpu").startswith("cudnn from 256; if cudnn is unsupported, reference to 1,024")
    assert bounds("tpu").endswith("splash")
