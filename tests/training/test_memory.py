"""Out-of-memory errors: the message has the numbers, and flags that reduce the memory of the recipe."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from training_recipes import change, text_recipe, tiny_batch, tiny_recipe

from transformer.cli._errors import run_program
from transformer.config import Execution, RotaryOptions, TransformerConfig
from transformer.data import TextFile
from transformer.nn._sharding import ParallelConfig, mesh_sizes
from transformer.training import Recipe, TrainingConfig
from transformer.training._loop import train
from transformer.training._memory import (
    EVALUATION,
    MemoryWatch,
    Need,
    OutOfMemoryError,
    advice,
    device_bytes,
    remedies,
    step_need,
    times_smaller,
)
from transformer.training._overrides import override
from transformer.training._parallel import MeshPlacement, place
from transformer.training._state import abstract_state
from transformer.training.plan import batch_shapes

pytestmark = pytest.mark.cpu_only("simulates other devices")

GIB = 2**30
FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 7 bytes.\nMore lines.")
RECIPE = Recipe(
    name="large",
    model=TransformerConfig(vocab_size=5_000, d_model=512, num_heads=8, num_layers=16, position=RotaryOptions()),
    data=TextFile(path="x", sequence_length=512, batch_size=64),
    execution=Execution(scan=True),
)
SHAPES = batch_shapes(RECIPE)


def need(state, gradients, activations):
    return Need(state=round(state * GIB), gradients=round(gradients * GIB), activations=round(activations * GIB))


def sizes(devices=1, **wanted):
    return mesh_sizes({"data": -1} | wanted, devices)


def by_flag(found):
    return {one.flags.rpartition(" ")[0]: one for one in found}


class TestRemedies:
    """Estimates of the memory that remains with an option."""

    def found(self, devices=1, times=4, recipe=RECIPE, wanted=None):
        wanted = wanted or need(2, 1, 40)
        return wanted, by_flag(remedies(recipe, sizes(devices), times, wanted, SHAPES))

    def test_micro_batches_divide_activations_and_keep_two_gradients(self):
        _, found = self.found()
        assert found["--training.accumulation"].need == need(2, 2, 10)
        assert found["--data.batch-size"].need == need(2, 1, 10)
        again = change(RECIPE, training={"accumulation": 2})
        _, found = self.found(recipe=again)
        assert found["--training.accumulation"].flags == "--training.accumulation 8"
        assert found["--training.accumulation"].need == need(2, 1, 10)

    def test_fsdp_divides_replicated_memory(self):
        _, found = self.found(devices=4)
        assert found["--parallel.fsdp"].need == need(0.5, 0.25, 40)
        assert "--parallel.fsdp" not in self.found()[1]

    def test_suggests_tensor_parallelism_if_fsdp_does_not_divide(self):
        odd = change(RECIPE, model={"d_model": 510, "attention.head_dim": 64, "feed_forward.d_ff": 2048})
        _, found = self.found(devices=4, recipe=odd)
        assert found["--parallel.tensor"].flags == "--parallel.tensor 4"

    @pytest.mark.parametrize(("asked", "together"), [(None, 2**21 // 5_000), (100, 100), (0, 64 * 512)])
    def test_remat_stores_one_layer_and_the_inputs_of_each(self, asked, together):
        before, found = self.found(recipe=change(RECIPE, training={"loss_tokens": asked}))
        left = found["--execution.remat"].need
        inputs, logits = 16 * 64 * 512 * 512 * 4, 2 * 4 * together * 5_000
        assert left.activations == pytest.approx(logits + (before.activations - logits) / 16 + inputs, rel=1e-6)
        assert (left.state, left.gradients) == (before.state, before.gradients)

    def test_an_estimated_remedy_never_exceeds_the_current_memory(self):
        small, found = self.found(wanted=need(2, 1, 0.1))
        assert all(one.need.activations <= small.activations for one in found.values())

    def test_each_suggested_flag_gives_a_valid_recipe(self):
        recipe = change(RECIPE, parallel={"devices": 4}, model={"num_layers": 1})
        for one in remedies(recipe, sizes(4), 2, need(2, 1, 40), SHAPES):
            MeshPlacement(override(recipe, one.flags.split(), program="x"))


class TestAdvice:
    """The text of the error message."""

    def test_prints_memory_and_remedies(self):
        text = advice(RECIPE, sizes(), need(2, 1, 40), 16 * GIB, SHAPES)
        assert text.startswith(
            "it needs about 43.00 GiB per device (parameters, optimizer state and batch 2.00 GiB, gradients 1.00 GiB, "
            "activations and temporaries 40.00 GiB), and JAX can use 16.00 GiB."
        )
        assert "--training.accumulation 4: smaller micro-batches, same result (about 14.00 GiB)" in text
        assert "--execution.remat full" in text
        assert "python -m transformer plan here RECIPE FLAGS" in text

    def test_reports_remedies_that_are_insufficient_alone(self):
        text = advice(RECIPE, sizes(), need(2, 7, 40), 12 * GIB, SHAPES)
        assert (
            "--training.accumulation 16: smaller micro-batches, same result (about 18.50 GiB, not enough on its own)"
            in text
        )
        assert re.search(r"--data\.batch-size 4: .* \(about 11\.50 GiB\)", text)

    def test_suggests_the_required_number_of_devices(self):
        text = advice(RECIPE, sizes(), need(40, 20, 4), 16 * GIB, SHAPES)
        assert "8 such devices with --parallel.fsdp 8: shards everything (about 8.00 GiB)" in text
        assert "accumulation" not in text  # the state alone is too large

    def test_reports_a_state_that_is_too_large_before_any_step(self):
        text = advice(RECIPE, sizes(), need(40, 0, 0), 16 * GIB)
        assert "(parameters, optimizer state and batch 40.00 GiB)" in text
        assert "remat" not in text

    def test_remedies_without_effect_are_omitted(self):
        model = dataclasses.replace(RECIPE, execution=Execution(remat="full"))
        odd = change(model, data={"batch_size": 1}, model={"dtype": "bfloat16"})
        text = advice(odd, sizes(), need(2, 1, 40), 16 * GIB, batch_shapes(odd))
        assert "Options that reduce it" not in text

    def test_reports_remedies_that_should_fit(self):
        assert "whether another process uses the device" in advice(RECIPE, sizes(), need(2, 1, 4), 16 * GIB, SHAPES)

    def test_a_gpu_remedy_raises_the_jax_memory_fraction(self, monkeypatch):
        monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
        given = RECIPE, sizes(), need(2, 1, 40), 16 * GIB, SHAPES
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in advice(*given, "gpu")
        assert "FRACTION" not in advice(*given, "tpu")
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")
        assert "FRACTION" not in advice(*given, "gpu")

    def test_bfloat16_is_not_suggested_on_cpu(self):
        given = RECIPE, sizes(), need(2, 1, 40), 16 * GIB, SHAPES
        assert "bfloat16" in advice(*given, "gpu")
        assert "bfloat16" not in advice(*given, "cpu")


class Refusing:
    """A placement whose compilation fails with an out-of-memory error of this text."""

    sizes = mesh_sizes({"data": 1}, 1)

    def __init__(self, recipe, words):
        self.recipe, self.words = recipe, words

    def abstract_state(self):
        return abstract_state(self.recipe)

    def whole_rows(self, rows):
        return rows

    def lower(self, batch):
        raise jax.errors.JaxRuntimeError(self.words)


def fail_inside(watch, error=FULL):
    with watch:
        raise error


def test_reads_the_out_of_memory_error_of_the_tpu_compiler():
    recipe = tiny_recipe()
    words = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 60.91G of 15.75G hbm."
    found = step_need(recipe, Refusing(recipe, words), tiny_batch())
    assert found.total == round(60.91 * GIB)
    watch = MemoryWatch(recipe)
    watch.placement, watch.batch = Refusing(recipe, "RESOURCE_EXHAUSTED: no more"), tiny_batch()
    with pytest.raises(OutOfMemoryError, match=r"JAX.*GiB.*XLA"):
        fail_inside(watch)


def test_memory_errors_before_the_first_step_are_explained():
    recipe = tiny_recipe()
    with pytest.raises(OutOfMemoryError, match=r"JAX.*XLA"):
        fail_inside(MemoryWatch(recipe))
    watch = MemoryWatch(recipe)
    watch.placement = place(recipe)
    with pytest.raises(OutOfMemoryError, match=r"0\.\d\d MiB"):
        fail_inside(watch)


@pytest.mark.parametrize("error", [jax.errors.JaxRuntimeError("INVALID_ARGUMENT: x"), ValueError("RESOURCE_EXHAUSTED")])
def test_other_errors_are_unchanged(error):
    with pytest.raises(type(error)) as raised:
        fail_inside(MemoryWatch(tiny_recipe()), error)
    assert raised.value is error


def test_evaluation_has_its_own_remedies():
    recipe = tiny_recipe()
    watch = MemoryWatch(recipe)
    watch.placement, watch.now = (
        place(recipe),
        EVALUATION,
    )  # before any step: a resumed run may start with an evaluation
    lower = rf"in evaluation: .* Lower --data.eval-batch-size \({recipe.data.eval_batch_size}\)"
    with pytest.raises(OutOfMemoryError, match=lower):
        fail_inside(watch)


def test_a_run_out_of_memory_exits_with_a_one_line_error(tmp_path, monkeypatch, capsys):
    """The step is actually compiled: the numbers come from the compiler, they are not estimates."""

    def refuse(self, state, batch, *limit):
        raise FULL

    monkeypatch.setattr(MeshPlacement, "train_step", refuse)
    recipe = text_recipe(tmp_path)
    assert run_program(lambda: train(recipe, tmp_path / "run").exit_code, debug=False) == 1
    output = capsys.readouterr().err
    assert output.count("\n") == 1
    found = re.match(
        r"error: out of memory in the training step: it needs about ([\d.]+) MiB per device \(parameters, optimizer "
        r"state and batch ([\d.]+) MiB, gradients ([\d.]+) MiB, activations and temporaries ([\d.]+) MiB\), and JAX",
        output,
    )
    total, *parts = map(float, found.groups())
    assert total == pytest.approx(sum(parts), abs=0.03)
    assert "RESOURCE_EXHAUSTED" not in output
    assert "--training.accumulation 2" in output


def test_devices_of_a_cpu_share_its_memory():
    assert device_bytes(jax.devices()[:4]) == device_bytes(jax.devices()[:1]) // 4
    assert times_smaller(60, 16, 1) == 4


def test_the_measured_step_includes_all_processes(monkeypatch):
    """A process has only its own rows of a batch, but the program runs on the rows of all processes."""
    recipe = tiny_recipe()
    placement = place(recipe)
    halves = {name: array[:4] for name, array in tiny_batch().items()}
    whole, half = (step_need(recipe, placement, batch) for batch in (tiny_batch(), halves))
    assert half.activations < whole.activations
    monkeypatch.setattr(MeshPlacement, "whole_rows", lambda self, rows: 2 * rows)
    assert step_need(recipe, placement, halves) == whole


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags", [["--training.accumulation", "4"], ["--execution.remat", "full"], ["--data.batch-size", "4"]]
)
def test_estimates_are_close_to_the_compiler(flags):
    """For a model whose memory is mostly activations; tolerance 25 %."""
    recipe = Recipe(
        name="x",
        model=TransformerConfig(vocab_size=64, d_model=32, num_heads=4, num_layers=8, position=RotaryOptions()),
        data=TextFile(path="x", sequence_length=64, batch_size=16),
        parallel=ParallelConfig(devices=1),
        training=TrainingConfig(),
    )

    def counted(recipe):
        return step_need(recipe, place(recipe), batch_shapes(recipe))

    whole = counted(recipe)
    assert whole.state == pytest.approx(
        3 * 4 * sum(x.size for x in jax.tree.leaves(abstract_state(recipe).params)), rel=0.1
    )
    (remedy,) = [
        one for one in remedies(recipe, sizes(), 4, whole, batch_shapes(recipe)) if one.flags == " ".join(flags)
    ]
    real = counted(override(recipe, flags, program="x"))
    assert remedy.need.total == pytest.approx(real.total, rel=0.25)
    assert real.total < 0.6 * whole.total
    assert jnp.isfinite(real.total)
