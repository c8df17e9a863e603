"""Runs that can't fit are refused before any memory is taken, and before anything is traced for long."""

import os
import resource

import jax
import pytest

from tests.training_recipes import change, text_recipe
from transformer.config import ConfigError
from transformer.training import _memory as checks
from transformer.training import train
from transformer.training._memory import OutOfMemoryError, host_bytes
from transformer.training._overrides import override

pytestmark = pytest.mark.cpu_only("simulates other devices")


def changed(folder, *flags):
    return override(text_recipe(folder), flags, program="test")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.d-model", "999999996"], "token embedding can't fit: .* 999,999,996 numbers need"),
        (["--model.feed-forward.d-ff", "1000000000"], "training state can't fit: it needs about .* GiB per device"),
        (["--model.num-layers", "20000000", "--execution.scan", "True"], "training state can't fit"),
        (["--data.batch-size", "1000000000"], r"a batch can't fit: .*tokens 1,000,000,000 x .*--data.batch-size"),
    ],
)
def test_a_run_that_cannot_fit_is_refused(tmp_path, flags, message):
    with pytest.raises(OutOfMemoryError, match=f"{message}.*--skip-memory-check"):
        train(changed(tmp_path, *flags), tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_rejects_layers_that_would_take_hours_to_trace(tmp_path):
    with pytest.raises(ConfigError, match=r"1,000,000.*--execution\.scan"):
        train(changed(tmp_path, "--model.num-layers", "1000000"), tmp_path / "run", check_memory=False)


def test_an_option_skips_the_check(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "device_bytes", lambda devices: 10)
    recipe = change(changed(tmp_path, "--training.steps", "1"), evaluation={"every": None, "samples": 0})
    with pytest.raises(OutOfMemoryError, match="token embedding can't fit"):
        train(recipe, tmp_path / "run")
    assert train(recipe, tmp_path / "run", check_memory=False).exit_code == 0


def test_limits_of_the_process_and_of_its_container_count(monkeypatch):
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_bytes() <= physical
    monkeypatch.setattr(resource, "getrlimit", lambda which: (12345, 12345))
    assert host_bytes() == 12345
    assert checks.device_bytes(jax.devices()[:4]) == 12345 // 4
