"""Runs of earlier versions (tests/fixtures/, created by its make.py) load, compute the same values, and resume."""

import dataclasses
import json
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

import transformer
from transformer.__main__ import main
from transformer.nn._sharding import ParallelConfig
from transformer.training._loop import train
from transformer.training._recipe import load_recipe
from transformer.training.metrics._writer import read_metrics
from transformer.training.workdir._runs import load_run

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
RUNS = ["0.2.0-encoder_decoder", "0.2.0-decoder"]

pytestmark = [pytest.mark.parametrize("run", RUNS)]


@pytest.fixture
def workdir(run, tmp_path):
    """The workdir of a run of six steps by that version."""
    with tarfile.open(FIXTURES / f"{run}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / run


@pytest.fixture
def recorded(run):
    """The values that that version computed from it."""
    return json.loads((FIXTURES / f"{run}.json").read_text())


@pytest.mark.programs(20, reason="it restores a checkpoint of an earlier version")
def test_an_earlier_run_computes_the_same_outputs(workdir, recorded):
    model, params = transformer.load(workdir)
    tokenizer = load_run(workdir, "newest").tokenizer
    assert [tokenizer.encode(text) for text in recorded["texts"]] == recorded["tokens"]
    inputs = [np.asarray([tokens], np.int32) for tokens in recorded["tokens"]]
    logits = jax.jit(model.apply)({"params": params}, *inputs)
    np.testing.assert_allclose(logits[0], recorded["logits"], atol=1e-5)


@pytest.mark.slow
def test_an_earlier_run_generates_text(workdir, recorded, capsys):
    assert main(["generate", str(workdir), "--prompt", recorded["texts"][0], "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.default_cases(1)
def test_an_earlier_run_resumes_exactly(workdir, recorded):
    recipe = load_recipe(workdir)
    paths = {
        name: str(FIXTURES / getattr(recipe.data, name))
        for name in ("path", "source_path", "target_path")
        if hasattr(recipe.data, name)
    }
    recipe = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, **paths),
        training=dataclasses.replace(recipe.training, steps=8),
        parallel=ParallelConfig(devices=1),
    )
    assert train(recipe, workdir).finished
    lines = {line["step"]: {} for line in recorded["metrics"]}
    for line in read_metrics(workdir / "metrics.jsonl"):
        lines.get(line["step"], {}).update(line)
    for expected in recorded["metrics"]:
        found = {name: lines[expected["step"]][name] for name in expected}
        assert found == pytest.approx(expected, rel=1e-5)
