"""Checkpoints: exact round trips, retention, detection of damage, and error messages."""

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer.training.workdir._checkpoint import Checkpointer, CheckpointError, CheckpointWarning, load_params


class Moments(NamedTuple):
    mu: dict
    count: jax.Array
    nothing: None = None


def make_state(seed=0, width=7):
    random = np.random.default_rng(seed)
    params = {
        "embedding": random.normal(size=(5, width)).astype(np.float32),
        "layers/odd name": {"kernel": random.normal(size=(3, 11)).astype(jnp.bfloat16)},
    }
    state = {
        "params": params,
        "ema": jax.tree.map(lambda x: x * 2, params),
        "optimizer": ((), Moments(jax.tree.map(np.cos, params), np.int32(seed)), np.zeros((0, 3), np.float32)),
        "step": np.int32(seed),
        "key": random.integers(0, 2**32, 2, np.uint32),
    }
    return jax.device_put(state)


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def same_bits(a, b):
    chex.assert_trees_all_equal_structs(a, b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def fill(workdir, steps, **options):
    with Checkpointer(workdir, **options) as checkpointer:
        for step in steps:
            checkpointer.save(step, make_state(step), data={"position": step}, recipe={"name": "r"})


def directory(workdir, step):
    return Path(workdir) / "checkpoints" / str(step)


def largest(path):
    return max((p for p in (path / "state").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_the_state_is_restored_bit_for_bit(tmp_path):
    state = make_state(3)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore_newest(abstract(state)) is None  # no checkpoint at all
        assert checkpointer.save(3, state, data={"next": [1, {"x": 2}]}, recipe={"name": "r"}, metric=0.5)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore_newest(abstract(state))
        assert checkpointer.newest_step == 3
    same_bits(restored.state, state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored.state))
    assert (restored.step, restored.data, restored.recipe, restored.metric) == (
        3,
        {"next": [1, {"x": 2}]},
        {"name": "r"},
        0.5,
    )


def test_data_state_may_be_bytes_or_absent(tmp_path):
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.save(1, {"x": np.ones(3)}, data=b"\x00\xff")
        assert checkpointer.restore_newest({"x": np.ones(3)}).data == b"\x00\xff"
        checkpointer.save(2, {"x": np.ones(3)})
        restored = checkpointer.restore_newest({"x": np.ones(3)})
    assert (restored.data, restored.recipe, restored.metric) == (None, None, None)


def test_leaves_are_restored_onto_the_requested_sharding(tmp_path):
    state = {"a": np.arange(16, dtype=np.float32).reshape(8, 2), "b": np.arange(3, dtype=np.int32)}
    state = jax.device_put(state | {"c": np.ones(5, jnp.bfloat16)})
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state)
        sharding = NamedSharding(Mesh(np.array(jax.devices()), "d"), PartitionSpec("d"))
        wanted = {
            "a": jax.ShapeDtypeStruct((8, 2), jnp.float32, sharding=sharding),
            "b": np.zeros(3, np.int32),
            "c": jax.ShapeDtypeStruct((5,), jnp.bfloat16),
        }
        restored = checkpointer.restore_newest(wanted).state
    same_bits(restored, state)
    assert restored["a"].sharding == sharding
    assert type(restored["b"]) is np.ndarray
    assert restored["c"].devices() == {jax.devices()[0]}


def test_the_saved_state_is_the_state_at_the_call(tmp_path):
    """The next step may donate or overwrite the arrays while they are still being written to disk."""
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    arrays = {"jax": jax.device_put(np.arange(1_000_000, dtype=np.float32)), "numpy": np.arange(1_000_000)}
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, arrays)
        arrays["numpy"][:] = -1
        overwrite(arrays["jax"]).block_until_ready()
        restored = checkpointer.restore_newest({"jax": np.zeros(1_000_000, np.float32), "numpy": np.arange(1_000_000)})
    assert np.array_equal(restored.state["jax"], np.arange(1_000_000.0))
    assert np.array_equal(restored.state["numpy"], np.arange(1_000_000))


@pytest.mark.parametrize(
    ("options", "metrics", "kept"),
    [
        ({"keep_last": 2, "keep_best": 0}, [1, 2, 3, 4], [3, 4]),
        ({"keep_last": 1, "keep_best": 1}, [3, 1, 2, 4], [2, 4]),
        ({"keep_last": 1, "keep_best": 2}, [3, 1, 2, float("nan")], [2, 3, 4]),
        ({"keep_last": 1, "keep_best": 1, "best": "max"}, [5, 1, None, 4], [1, 4]),
    ],
)
def test_the_last_and_the_best_are_kept(tmp_path, options, metrics, kept):
    with Checkpointer(tmp_path, **options) as checkpointer:
        for step, metric in enumerate(metrics, start=1):
            checkpointer.save(step, {"x": np.full(3, step)}, metric=metric)
        checkpointer.wait()
        assert checkpointer.steps() == kept
        assert checkpointer.restore_newest({"x": np.zeros(3, int)}).state["x"][0] == len(metrics)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == sorted(map(str, kept))


def test_a_damaged_newer_checkpoint_does_not_delete_valid_ones(tmp_path):
    """After a fallback from 30 to 20, `keep_last=1` must not keep the damaged 30 and delete the new checkpoint."""
    fill(tmp_path, [20, 30], keep_last=2)
    flip(largest(directory(tmp_path, 30)))
    with Checkpointer(tmp_path, keep_last=1, keep_best=0) as checkpointer:
        with pytest.warns(CheckpointWarning, match="SHA-256"):
            assert checkpointer.restore_newest(abstract(make_state())).step == 20
        checkpointer.save(25, make_state(25))
        checkpointer.wait()
        assert 25 in checkpointer.steps()
        with pytest.warns(CheckpointWarning, match=r"30.*30\.invalid"):
            checkpointer.save(30, make_state(31))
        checkpointer.wait()
        same_bits(checkpointer.restore_newest(abstract(make_state())).state, make_state(31))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["30", "30.invalid"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    fill(tmp_path, [10, 20, 30], keep_last=3)
    flip(largest(directory(tmp_path, 30)))
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        with pytest.warns(CheckpointWarning, match="SHA-256"):
            checkpointer.restore_newest(abstract(make_state()))
        checkpointer.save(25, make_state(25))
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["20", "25", "30"]


def test_the_newest_checkpoint_is_never_deleted(tmp_path):
    fill(tmp_path, [20, 30])
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        checkpointer.save(25, make_state(25))  # by a run that resumed from an older step
        checkpointer.wait()
        assert checkpointer.steps() == [25, 30]


def test_a_step_is_written_once_and_its_metadata_updated(tmp_path):
    """A run stopped during evaluation saves without a metric. After a resume, it evaluates and saves the same step."""
    state = {"x": np.ones(3)}
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.save(1, state, data={"evaluated": False})
        assert not checkpointer.save(1, state, data={"evaluated": False})
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        assert checkpointer.restore_newest(state).metric is None
        assert checkpointer.save(1, state, data={"evaluated": True}, metric=0.25)
        assert not checkpointer.save(1, state, data={"evaluated": True})  # the metric stays
    with Checkpointer(tmp_path, keep_last=1) as checkpointer:
        restored = checkpointer.restore_newest(state)
        assert (restored.data, restored.metric) == ({"evaluated": True}, 0.25)
        checkpointer.save(2, state, metric=0.5)
        checkpointer.wait()
        assert checkpointer.steps() == [1, 2]  # the best and the last
        assert checkpointer.save(2, state, metric=0.125)
        assert checkpointer.steps() == [2]


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def damage_flip(path):
    flip(largest(path))


def damage_truncate(path):
    os.truncate(largest(path), largest(path).stat().st_size // 2)


def damage_missing_file(path):
    largest(path).unlink()


def damage_half_copied(path):
    (path / "manifest.json").unlink()


def damage_empty(path):
    shutil.rmtree(path)
    path.mkdir()


def damage_manifest_torn(path):
    os.truncate(path / "manifest.json", 100)


def damage_manifest_flipped(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"metric": -1.0}))


def damage_manifest_without_hash(path):
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["manifest_sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def damage_other_format(path):
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))


def damage_foreign(path):
    (path / "manifest.json").write_text('{"files": {}}')


def damage_renamed(path):
    os.rename(path, path.parent / "1000")


DAMAGES = [
    (damage_flip, r"/30/state/\S+ has SHA-256 \w+\.\.\., expected \w+\.\.\.: its content was changed"),
    (damage_truncate, r"/30/state/\S+ has \d+ bytes, expected \d+: truncated"),
    (damage_missing_file, r"/30/state/\S+ is missing"),
    (damage_half_copied, r"/30 has no manifest.json: incompletely copied, or not written by this program"),
    (damage_empty, r"/30 is empty"),
    (damage_manifest_torn, r"/30/manifest.json is not valid JSON: truncated"),
    (damage_manifest_flipped, r"/30/manifest.json does not match its own SHA-256"),
    (damage_manifest_without_hash, r"/30/manifest.json does not match its own SHA-256"),
    (damage_other_format, r"/30/manifest.json has format 99, expected format 1"),
    (damage_foreign, r"/30/manifest.json was not written by this program"),
    (damage_renamed, r"/1000/manifest.json is of step 30, but its directory is 1000"),
]


@pytest.fixture(scope="module")
def two_checkpoints(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("two")
    fill(workdir, [20, 30])
    return workdir


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=lambda x: getattr(x, "__name__", ""))
def test_damage_is_reported_and_the_newest_valid_checkpoint_used(two_checkpoints, tmp_path, damage, message):
    workdir = tmp_path / "workdir"
    shutil.copytree(two_checkpoints, workdir)
    damage(directory(workdir, 30))
    with Checkpointer(workdir) as checkpointer:
        with pytest.warns(CheckpointWarning, match="Using the checkpoint of step 20.*" + message):
            restored = checkpointer.restore_newest(abstract(make_state()))
        assert restored.data == {"position": 20}
        same_bits(restored.state, make_state(20))
    with pytest.warns(CheckpointWarning, match=message):
        assert load_params(workdir)[1] == 20
    # If no other checkpoint is left, it is an error; the run must not restart from step 0.
    shutil.rmtree(directory(workdir, 20))
    with Checkpointer(workdir) as checkpointer, pytest.raises(CheckpointError, match=message) as caught:
        checkpointer.restore_newest(abstract(make_state()))
    assert "A run never restarts from step 0 automatically" in str(caught.value)
    with pytest.raises(CheckpointError, match="No valid checkpoint"):
        load_params(workdir)


def test_every_flipped_bit_of_an_array_is_detected(two_checkpoints, tmp_path):
    workdir = tmp_path / "workdir"
    shutil.copytree(two_checkpoints, workdir)
    path = largest(directory(workdir, 30))
    content = path.read_bytes()
    with Checkpointer(workdir) as checkpointer:
        for bit in range(0, 8 * len(content), 8 * len(content) // 23):
            changed = bytearray(content)
            changed[bit // 8] ^= 1 << bit % 8
            path.write_bytes(changed)
            with pytest.warns(CheckpointWarning, match=path.name):
                assert checkpointer.restore_newest(abstract(make_state())).step == 20


def test_an_empty_newer_directory_is_skipped(tmp_path):
    fill(tmp_path, [2])
    directory(tmp_path, 7).mkdir()
    (tmp_path / "checkpoints" / "notes").mkdir()  # not a step, so it is ignored
    with Checkpointer(tmp_path) as checkpointer, pytest.warns(CheckpointWarning, match=r"step 2.*/7 is empty"):
        assert checkpointer.restore_newest(abstract(make_state())).step == 2
    (tmp_path / "checkpoints" / "003").mkdir()
    with pytest.raises(FileNotFoundError, match=r"Available steps: 2, 7\."):
        load_params(tmp_path, step=3)


def test_all_differences_from_the_model_are_in_one_error(tmp_path):
    fill(tmp_path, [1])
    wanted = abstract(make_state())
    wanted["params"]["embedding"] = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    wanted["ema"]["embedding"] = jax.ShapeDtypeStruct((5, 7), jnp.bfloat16)
    wanted["step"] = jax.ShapeDtypeStruct((), jnp.int8)
    wanted["new"] = wanted.pop("key")
    with Checkpointer(tmp_path) as checkpointer, pytest.raises(CheckpointError) as caught:
        checkpointer.restore_newest(wanted)
    message = str(caught.value)
    assert "does not match this model and optimizer, 5 difference(s)" in message
    for line in [
        "params/embedding: float32[5,7] in the checkpoint, expected float32[5,8]",
        "ema/embedding: float32[5,7] in the checkpoint, expected bfloat16[5,7]",
        "step: int32[] in the checkpoint, expected int8[]",
        "new: not in the checkpoint",
        "key: only in the checkpoint",
    ]:
        assert line in message


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.bfloat16, jnp.float16])
def test_no_array_is_cast(tmp_path, dtype):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": jax.device_put(np.full(3, 300.7, np.float32))})
        with pytest.raises(CheckpointError, match=r"float32\[3\]"):
            checkpointer.restore_newest({"x": jax.ShapeDtypeStruct((3,), dtype)})


def test_float64_keeps_its_precision(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"x": np.full(3, 0.1)})
        assert checkpointer.restore_newest({"x": np.zeros(3)}).state["x"].dtype == np.float64
        with pytest.raises(ValueError, match=r"x.*float64.*JAX.*float32"):
            checkpointer.restore_newest({"x": jax.ShapeDtypeStruct((3,), np.float64)})


def test_the_average_has_more_bits_than_the_parameters(tmp_path):
    """An average is stored in float32; a model gets it in its own dtypes."""
    params = {"kernel": np.arange(3).astype(jnp.bfloat16)}
    third = np.full(3, 1 / 3, np.float32)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, jax.device_put({"params": params, "ema": {"kernel": third}}))
    average, _ = load_params(tmp_path, names=("ema", "params"))
    np.testing.assert_array_equal(average["kernel"], third.astype(jnp.bfloat16), strict=True)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore_newest(
            {"params": params, "ema": {"kernel": jax.ShapeDtypeStruct((3,), jnp.float32)}}
        )
        np.testing.assert_array_equal(restored.state["ema"]["kernel"], third, strict=True)
        with pytest.raises(CheckpointError, match="ema/kernel"):
            checkpointer.restore_newest({"params": params, "ema": {"kernel": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}})


def test_restores_only_parameters(tmp_path):
    with Checkpointer(tmp_path, keep_last=3) as checkpointer:
        for step, metric in [(1, 0.3), (2, 0.1), (3, 0.2)]:
            checkpointer.save(step, make_state(step), metric=metric)
    for choice, expected in [("newest", 3), ("best", 2), (1, 1)]:
        params, step = load_params(tmp_path, step=choice)
        assert step == expected
        same_bits(params, make_state(expected)["params"])
    assert load_params(tmp_path, step="best", best="max")[1] == 1
    same_bits(load_params(tmp_path, names=("averages", "ema", "params"))[0], make_state(3)["ema"])
    with pytest.raises(CheckpointError, match=r"has no field averages\. Its fields: ema, key, optimizer, params, step"):
        load_params(tmp_path, names="averages")
    with pytest.raises(FileNotFoundError, match=r"No checkpoint of step 4 .* Available steps: 1, 2, 3"):
        load_params(tmp_path, step=4)
    flip(largest(directory(tmp_path, 2)))
    with pytest.raises(CheckpointError, match=r"/2/state/\S+.*SHA-256.*1.*2.*3"):
        load_params(tmp_path, step="best")
    with pytest.raises(FileNotFoundError, match="Train first"):
        load_params(tmp_path / "nowhere")
    fill(tmp_path / "other", [1])
    with pytest.raises(CheckpointError, match="has the metric"):
        load_params(tmp_path / "other", step="best")


def test_rejects_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"keep_last.*1"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ValueError, match=r"'min'.*'max'"):
        Checkpointer(tmp_path, best="lowest")
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(TypeError, match="step is a int, expected an array"):
            checkpointer.save(1, {"step": 1})
        with pytest.raises(TypeError, match="rng is a typed random key"):
            checkpointer.save(1, {"rng": jax.random.key(0)})
        with pytest.raises(ValueError, match="JSON"):
            checkpointer.save(1, {"x": np.ones(1)}, data=float("nan"))


@pytest.mark.slow
def test_orbax_s_manager_restores_a_damaged_step_without_an_error(tmp_path):
    """The reason why each checkpoint has a manifest of hashes, which is verified before anything is restored."""
    import orbax.checkpoint as ocp

    tree = {"a": jnp.arange(1000.0), "b": jnp.ones((64, 64))}
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
    data = max((path for path in (tmp_path / "run" / "1").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    whole, silent = data.read_bytes(), 0
    for place in range(len(whole) // 3, 2 * len(whole) // 3, len(whole) // 24):
        data.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with ocp.CheckpointManager(tmp_path / "run") as manager:
            restored = tree
            with contextlib.suppress(Exception):  # an error means that Orbax noticed the damage
                restored = manager.restore(1, args=ocp.args.StandardRestore(tree))
        silent += any(not np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (restored, tree)), strict=True))
    assert silent
