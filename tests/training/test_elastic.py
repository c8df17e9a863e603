"""Elastic resume: a run resumes on other devices and meshes, because checkpoints do not depend on them."""

import dataclasses

import jax
import numpy as np
import pytest
from training_recipes import change, text_recipe

from transformer.nn._sharding import DcnConfig, ParallelConfig
from transformer.training._loop import train
from transformer.training.metrics._writer import read_metrics

pytestmark = pytest.mark.cpu_only("needs eight devices")

HOST = pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="XLA can't offload on a CPU")
LAYOUTS = {
    "fsdp": ParallelConfig(fsdp=2, data=2, devices=4),
    "pmap": ParallelConfig(kind="pmap", devices=4),
    "context": ParallelConfig(context=2, data=2, devices=4),
    "one": ParallelConfig(devices=1),
    "slices": ParallelConfig(fsdp=2, devices=4, dcn=DcnConfig(data=2)),
    "host": ParallelConfig(fsdp=2, devices=2, optimizer_memory_host_offload=True),
}


def recipe_of(folder, layout, steps):
    recipe = text_recipe(folder, model={"dropout_rate": 0.0}, training={"steps": steps}, logging={"every": 1})
    return change(dataclasses.replace(recipe, parallel=LAYOUTS[layout]), evaluation={"samples": 0})


def losses(workdir):
    return [
        (line["step"], line["train/loss"]) for line in read_metrics(workdir / "metrics.jsonl") if "train/loss" in line
    ]


@pytest.fixture(scope="module")
def uninterrupted(folder):
    train(recipe_of(folder, "one", 12), folder / "whole")
    return losses(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    "order",
    [
        ("one", "fsdp", "pmap"),
        pytest.param(("pmap", "context", "one"), marks=pytest.mark.slow),
        pytest.param(("slices", "host", "slices"), marks=[pytest.mark.slow, HOST]),
    ],
)
def test_a_run_resumes_twice_on_different_devices(order, folder, uninterrupted, capsys):
    workdir = folder / "-".join(order)
    for steps, layout in zip((4, 8, 12), order, strict=True):
        summary = train(recipe_of(folder, layout, steps), workdir)
        assert summary.step == steps
    assert "resuming from step 8, to step 12" in capsys.readouterr().out
    found = losses(workdir)
    assert [step for step, _ in found] == [step for step, _ in uninterrupted]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in uninterrupted], rtol=1e-5)
