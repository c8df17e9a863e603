"""Fixtures of the tests of training."""

import pytest


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder that the tests of a file share."""
    return tmp_path_factory.mktemp("runs")
