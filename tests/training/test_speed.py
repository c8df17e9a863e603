"""Speed in the metrics: FLOP/s and MFU by the documented formula, memory, and compilation time."""

import dataclasses
import math
import re

import jax
import numpy as np
import pytest
from training_recipes import tiny_batch, tiny_recipe

from transformer.config import FeedForwardOptions, ParameterOptions, RotaryOptions, TransformerConfig
from transformer.data import TextFile
from transformer.training import _flops as speed_module
from transformer.training._chips import CHIPS, DEVICE_KINDS, GPU_FLOPS, peak_flops
from transformer.training._flops import Speed
from transformer.training._memory import peak_bytes
from transformer.training._parallel import place
from transformer.training._state import abstract_state
from transformer.training.metrics._writer import MetricsWriter, Progress, read_metrics
from transformer.training.plan import batch_shapes, step_flops
from transformer.training.workdir._journal import Journal, TrainStats


class Spread:
    """A placement on several devices, where this process has an equal part of the rows."""

    def __init__(self, devices=1, processes=1):
        self.sizes, self.processes = {"data": devices}, processes

    def whole_rows(self, rows):
        return rows * self.processes


def shapes_of(recipe):
    return abstract_state(recipe).params


def test_a_device_has_its_share_of_the_chip_peak():
    assert peak_flops("TPU v5 lite") == 197e12
    assert peak_flops("TPU v3") == CHIPS["v3"].flops / 2
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("Tesla T4") == 65e12
    assert {peak_flops(f"NVIDIA {name}") for name in GPU_FLOPS} == set(GPU_FLOPS.values())
    assert all(peak_flops(kind) for kind in DEVICE_KINDS)


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40S", "TPU v9"])
def test_an_unknown_device_has_no_peak(kind):
    assert peak_flops(kind) is None


def test_flops_equal_the_formula_of_palm():
    """6 N + 12 L H Q T per token (Chowdhery et al. 2022, appendix B), if only matrices have parameters."""
    layers, heads, size, length, rows, vocabulary = 3, 2, 6, 11, 4, 13
    model = TransformerConfig(
        vocab_size=vocabulary,
        d_model=heads * size,
        num_heads=heads,
        num_layers=layers,
        feed_forward=FeedForwardOptions(d_ff=17),
        parameters=ParameterOptions(use_bias=False),
        position=RotaryOptions(),
    )
    data = TextFile(path="x", sequence_length=length, batch_size=rows)
    recipe = dataclasses.replace(tiny_recipe(), model=model, data=data)
    width = heads * size
    matrices = layers * (4 * width**2 + 2 * width * 17) + vocabulary * width
    each = 6 * matrices + 12 * layers * heads * size * length
    assert step_flops(recipe).total == rows * length * each


def test_flops_use_the_shapes_of_the_batch():
    """Batches of pairs have different shapes; FLOPs of matrices are proportional to rows and length."""
    recipe = tiny_recipe("seq2seq")
    params, batch = shapes_of(recipe), tiny_batch("seq2seq", rows=4)
    once = step_flops(recipe, batch, params)
    twice = step_flops(recipe, tiny_batch("seq2seq", rows=8), params)
    assert (twice.matrices, twice.attention) == (2 * once.matrices, 2 * once.attention)
    longer = {name: np.concatenate([array] * 2, 1) if array.ndim == 2 else array for name, array in batch.items()}
    long = step_flops(recipe, longer, params)
    assert (long.matrices, long.attention) == (2 * once.matrices, 4 * once.attention)
    assert step_flops(tiny_recipe()) == step_flops(tiny_recipe(), batch_shapes(tiny_recipe()), shapes_of(tiny_recipe()))


@pytest.fixture
def known(monkeypatch):
    """These devices have a peak of 1e6 FLOP/s each."""
    monkeypatch.setattr(speed_module, "peak_flops", lambda kind: 1e6)


def test_mfu_is_a_share_of_all_devices(known):
    recipe = tiny_recipe()
    one, four = (Speed(recipe, shapes_of(recipe), Spread(devices)) for devices in (1, 4))
    assert one.measures(3_000_000, 6.0) == {"perf/flops_per_s": 5e5, "perf/mfu": 0.5}
    assert four.measures(3_000_000, 6.0)["perf/mfu"] == 0.125
    assert re.fullmatch(r"MFU: .* 0 TFLOP/s x 4 devices, the bfloat16 peak of cpu", str(four))


def test_rows_of_other_processes_count(known):
    recipe, batch = tiny_recipe(), tiny_batch()
    alone, together = (Speed(recipe, shapes_of(recipe), Spread(2, processes)) for processes in (1, 2))
    assert alone.flops(batch) == step_flops(recipe, batch).total
    assert together.flops(batch) == 2 * alone.flops(batch)


def test_reports_that_mfu_needs_a_known_peak():
    recipe = tiny_recipe()
    speed = Speed(recipe, shapes_of(recipe), place(recipe))
    assert speed.measures(100, 4.0) == {"perf/flops_per_s": 25.0}
    assert re.match(r"MFU is unavailable: .*\bcpu\b", str(speed))


def journal_lines(tmp_path, monkeypatch, *, compiled_at=(), **kwargs):
    """Return the metrics of six steps of one second each, two per line; compilations take ten seconds each."""
    now = [0.0]
    monkeypatch.setattr("transformer.training.workdir._journal.time.perf_counter", lambda: now[0])
    recipe = tiny_recipe(steps=6)
    recipe = dataclasses.replace(recipe, logging=dataclasses.replace(recipe.logging, every=2))
    told = {"loss_sum": 1.0, "weight": 8.0, "grad_norm": 1.0, "learning_rate": 0.1, "skipped": 0, "finite": True}
    speed, batch = Speed(recipe, shapes_of(recipe), Spread()), tiny_batch()
    with MetricsWriter(tmp_path) as writer:
        journal = Journal(recipe, TrainStats(), writer, Progress(6, mode="none"), [], speed=speed)
        for step in range(1, 7):
            if step in compiled_at:
                journal.read()
                now[0] += 10.0
                journal.compiled(10.0)
            journal.add(step, {name: np.asarray(value) for name, value in told.items()}, batch=batch)
            now[0] += 1.0
        journal.read()
    return read_metrics(tmp_path / "metrics.jsonl"), speed.flops(batch)


def test_every_line_has_speed_and_memory(tmp_path, monkeypatch, known):
    lines, flops = journal_lines(tmp_path, monkeypatch, compiled_at=(1,))
    assert [line["perf/flops_per_s"] for line in lines] == pytest.approx([flops] * 3)
    assert [line["perf/mfu"] for line in lines] == pytest.approx([flops / 1e6] * 3)
    assert all(line["perf/peak_memory_bytes"] > 2**20 for line in lines)
    assert [line.get("perf/compile_s") for line in lines] == [10.0, None, None]


def test_reports_compilation_separately_from_training(tmp_path, monkeypatch):
    """A batch of a new size during a run, which is compiled, does not reduce the reported speed."""
    (tmp_path / "a").mkdir()
    plain, _ = journal_lines(tmp_path / "a", monkeypatch, compiled_at=(1,))
    lines, _ = journal_lines(tmp_path, monkeypatch, compiled_at=(1, 4))
    assert [line.get("perf/compile_s") for line in lines] == [10.0, 10.0, None]
    for name in ("perf/tokens_per_s", "perf/flops_per_s", "perf/step_time_s"):
        assert [line[name] for line in lines] == pytest.approx([line[name] for line in plain])


def test_memory_is_the_maximum_over_devices(monkeypatch):
    class Device:
        def __init__(self, stats):
            self.memory_stats = lambda: stats

    held = [Device({"peak_bytes_in_use": size}) for size in (3, 7, 5)]
    monkeypatch.setattr(jax, "local_devices", lambda: held)
    assert peak_bytes() == 7
    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    assert peak_bytes() > 50 * 2**20  # this process


def test_figures_have_a_plausible_magnitude():
    assert all(math.isfinite(peak) and 1e13 < peak < 1e16 for peak in GPU_FLOPS.values())
