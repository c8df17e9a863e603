"""Peak memory of loading: little more than the parameters, measured with a checkpoint of 1 GB."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_peak_host_memory_is_bounded(dtype):
    """Peak memory is at most 1.2 times the file size, including the parameters."""
    command = [sys.executable, "-m", "benchmarks.loading", "--gigabytes", "1", "--dtype", dtype]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] > 0.9e9
    assert found["ratio"] <= 1.2
