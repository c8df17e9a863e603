"""Forecasts: independent channels, any scale; batch norms with frozen statistics."""

import dataclasses
import functools

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from golden import case as golden_case
from golden import ours
from numeric_parts import random_params

from transformer.config import ConfigError, FeedForwardOptions, Series, TransformerConfig
from transformer.inference import LoadedModel, embed
from transformer.nn._parameter_axes import axes_of
from transformer.nn.layers._norms import FrozenBatchNorm
from transformer.nn.models import Forecaster
from transformer.nn.models._forecaster import cut_series
from transformer.zoo import abstract_params, load_pretrained

SERIES = Series(channels=3, context_length=13, horizon=5, patch_length=4, patch_stride=3)
CONFIG = TransformerConfig(
    d_model=12, num_layers=1, num_heads=3, feed_forward=FeedForwardOptions(d_ff=17, activation="gelu_erf"), input=SERIES
)
NUMBERS = np.random.default_rng(1).normal(size=(2, 13, 3)).astype(np.float32)
VALUES = jax.device_put(NUMBERS)


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def forecaster(**changes):
    """Return a model whose series config has these changes."""
    return Forecaster(CONFIG.replace(input=dataclasses.replace(SERIES, **changes)))


@pytest.fixture(scope="module")
def variables():
    return random_params(forecaster(), VALUES)


@pytest.mark.parametrize(("length", "stride"), [(4, 3), (5, 3), (3, 4), (13, 2)])
def test_patches_end_with_the_series(length, stride):
    series = dataclasses.replace(SERIES, patch_length=length, patch_stride=stride)
    patches = np.asarray(jax.jit(lambda: cut_series(VALUES, series))())
    assert patches.shape == (2, 3, series.patches, length)
    for patch in range(series.patches):
        end = 13 - stride * (series.patches - 1 - patch)
        np.testing.assert_array_equal(patches[:, :, patch], NUMBERS[:, end - length : end].swapaxes(1, 2))
    assert end == 13
    assert 13 - length - stride * (series.patches - 1) < stride  # another patch would not fit


def test_a_forecast_is_on_the_scale_of_its_series(variables):
    """std: the forecast of a x + b is a times the forecast of x, plus b; mean: the same for a x; none: neither."""
    factor, shift = np.float32([7.0, 2.0, 300.0]), np.float32([-5.0, 0.0, 40.0])
    for scaling, moved in {"std": shift, "mean": 0.0 * shift, "none": 0.0 * shift}.items():
        call = jax.jit(forecaster(scaling=scaling).apply)
        plain, other = np.asarray(call(variables, VALUES)), call(variables, NUMBERS * factor + moved)
        close = np.allclose(other, plain * factor + moved, rtol=1e-3, atol=1e-2)
        assert close == (scaling != "none"), scaling


@pytest.mark.parametrize("shared", [True, False])
def test_channels_are_independent(variables, shared):
    """A change of one channel does not change the others. With a shared map, the order of channels has no meaning."""
    model = forecaster(shared_embedding=shared)
    if not shared:
        own = abstract_params(model)["channel_embedding"]
        own = {name: normal(0, *leaf.shape) for name, leaf in own.items()}
        params = {name: leaf for name, leaf in variables["params"].items() if name != "series_embedding"}
        variables = {"params": params | {"channel_embedding": own}}
    call = jax.jit(model.apply)
    plain = np.asarray(call(variables, VALUES))
    assert plain.shape == (2, 5, 3)
    moved = NUMBERS.copy()
    moved[:, 7, 1] += 1
    changed = np.asarray(call(variables, moved))
    np.testing.assert_array_equal(np.abs(changed - plain).max((0, 1)) > 0, [False, True, False])
    reversed_channels = call(variables, NUMBERS[:, :, ::-1])
    assert np.allclose(reversed_channels, plain[:, :, ::-1], atol=1e-5) == shared


def test_the_head_reads_the_pooled_vector():
    hidden = normal(0, 2, 3, 4, 12)
    wanted = {
        "flatten": hidden.reshape(2, 3, 48),
        "mean": hidden.mean(2),
        "max": hidden.max(2),
        "class_token": hidden[:, :, 0],
    }
    for name, read in wanted.items():
        model = forecaster(**({name: True} if name == "class_token" else {"pooling": name}))
        kernel, bias = normal(1, read.shape[-1], 5), np.arange(5, dtype=np.float32)
        params = {"params": {"output": {"kernel": kernel, "bias": bias}, "class_token": bias[:1].repeat(12)}}
        got = jax.jit(functools.partial(model.apply, method=Forecaster.head))(params, hidden)
        np.testing.assert_allclose(got, (read @ kernel + bias).swapaxes(1, 2), atol=1e-4, err_msg=name)


def test_the_class_token_comes_first():
    model = forecaster(class_token=True)
    params = abstract_params(model)
    hidden = jax.eval_shape(functools.partial(model.apply, method=Forecaster.hidden), {"params": params}, VALUES)
    assert hidden.shape == (2, 3, 1 + SERIES.patches, 12)
    assert params["class_token"].shape == (12,)


def test_training_reaches_every_parameter(variables):
    """With dropout every key gives another loss, and the same key the same loss."""
    model = Forecaster(CONFIG.replace(dropout_rate=0.3))

    def loss(params, key):
        forecast, aux = model.apply({"params": params}, VALUES, False, rngs={"dropout": key}, method="with_aux")
        assert aux == {}
        return jnp.square(forecast - 1.0).mean()

    slope = jax.jit(lambda params, seed: jax.value_and_grad(loss)(params, jax.random.key(seed)))
    first, gradients = jax.device_get(slope(variables["params"], 0))
    again, other = (float(slope(variables["params"], seed)[0]) for seed in (0, 3))
    np.testing.assert_allclose(again, first, rtol=1e-6)
    assert abs(other - first) > 1e-4
    key_bias = gradients["encoder"]["layers"]["slot_0"]["self_attention"]["key"].pop("bias")
    assert np.abs(key_bias).max() < 1e-6  # it shifts all scores of a query equally
    for path, gradient in flax.traverse_util.flatten_dict(gradients, sep="/").items():
        assert np.abs(gradient).max() > 1e-6, path


@pytest.mark.slow
def test_a_forecaster_learns_a_line():
    """Training with dropout: the error of a linear continuation falls to a quarter in a few steps."""
    model = Forecaster(CONFIG.replace(dropout_rate=0.1))
    start = jax.random.normal(jax.random.key(0), (16, 1, 3))
    line = start + 0.1 * jnp.arange(18.0)[None, :, None] * jnp.sign(start)
    optimizer = optax.adam(1e-2)

    def loss(params, key):
        forecast, aux = model.apply({"params": params}, line[:, :13], False, rngs={"dropout": key}, method="with_aux")
        assert aux == {}
        return jnp.square(forecast - line[:, 13:]).mean()

    @jax.jit
    def step(state, key):
        params, inner = state
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, inner = optimizer.update(gradients, inner)
        return (optax.apply_updates(params, updates), inner), value

    key = jax.random.key(0)
    params = model.init(key, line[:, :13])["params"]
    _, losses = jax.lax.scan(step, (params, optimizer.init(params)), jax.random.split(key, 40))
    assert losses[-5:].mean() < 0.25 * losses[0]


def test_a_frozen_batch_norm_uses_its_stored_statistics():
    """The output is that of the equation, and mean and variance get no gradient."""
    drawn = normal(2, 4, 7)
    params = {"scale": drawn[0], "bias": drawn[1], "mean": drawn[2], "variance": drawn[3] ** 2 + 0.1}
    module, x = FrozenBatchNorm(1e-3), normal(0, 2, 5, 7)

    @jax.jit
    def run(params, x):
        gradients = jax.grad(lambda params: jnp.square(module.apply({"params": params}, x)).sum())(params)
        return module.apply({"params": params}, x), gradients, module.init_with_output(jax.random.key(0), x)[0]

    got, gradients, initial = jax.device_get(run(params, x))
    expected = params["scale"] * (x - params["mean"]) / np.sqrt(params["variance"] + 1e-3) + params["bias"]
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert {name: bool(np.any(one != 0)) for name, one in gradients.items()} == {
        "scale": True,
        "bias": True,
        "mean": False,
        "variance": False,
    }
    np.testing.assert_allclose(initial, x / np.sqrt(1 + 1e-3), atol=1e-6)


def test_without_final_norm_no_norm_is_created():
    encoder = abstract_params(Forecaster(CONFIG.replace(**{"stack.final_norm": False})))["encoder"]
    assert encoder.keys() == abstract_params(Forecaster(CONFIG))["encoder"].keys() - {"final_norm"}


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (CONFIG, NUMBERS[0], r"\(batch.*13.*3\).*got float32.*\(13.*3\)"),
        (CONFIG, NUMBERS[:, 1:], r"got float32.*\(2.*12.*3\).*13"),
        (CONFIG, NUMBERS.astype(np.int32), r"series.*got int32"),
        (CONFIG.replace(input=None), VALUES, r"input is not a series: a Forecaster needs"),
    ],
)
def test_rejects_invalid_forecast_inputs(config, values, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        jax.eval_shape(lambda values: Forecaster(config).init(jax.random.key(0), values), values)


def test_a_forecaster_rejects_texts(tmp_path):
    opened = LoadedModel(Forecaster(CONFIG), {}, tmp_path, vocabulary=None, context=None, bos_id=None)
    with pytest.raises(ConfigError, match=r"contains a Forecaster, which reads series, not text"):
        embed(opened, ["one"])


@pytest.mark.parametrize("shared", [True, False])
def test_every_parameter_has_axes(shared):
    series = dataclasses.replace(SERIES, shared_embedding=shared, class_token=True)
    model = Forecaster(CONFIG.replace(input=series, **{"norm.kind": "frozen_batch_norm"}))
    for path, leaf in flax.traverse_util.flatten_dict(abstract_params(model), sep="/").items():
        axes = axes_of(path, leaf.ndim)
        assert axes is not None, path
        assert leaf.ndim - len(axes.names) == ("/layers/" in path), (path, leaf.shape, axes)


def opened(tmp_path, **fields):
    record = golden_case.golden("patchtst")["forecast"]
    return load_pretrained(ours.write(tmp_path, record | {"config": record["config"] | fields}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["PatchTSTForMaskedPrediction"]},
            r"PatchTSTForMaskedPrediction",
        ),
        ({"loss": "nll"}, r"loss.*'nll'"),
        ({"channel_attention": True}, r"channel_attention"),
        ({"share_projection": False}, r"share_projection"),
        ({"architectures": ["PatchTSTForRegression"], "loss": "nll"}, r"loss.*'nll'"),
        (
            {"architectures": ["PatchTSTForRegression"], "pooling_type": "max", "output_range": [3, 1]},
            r"two increasing numbers, low and high",
        ),
        (
            {"architectures": ["PatchTSTForClassification"]},
            r"pooling_type.*use_cls_token",
        ),
        ({"architectures": ["PatchTSTForPretraining"], "mask_value": 1}, r"mask_value.*1"),
        ({"architectures": ["PatchTSTModel"], "do_mask_input": True}, r"do_mask_input"),
        ({"scaling": "robust"}, r"scaling.*'robust'.*\(supported"),
        ({"pooling_type": "min"}, r"pooling_type.*'min'.*\(supported"),
        (
            {"norm_type": "instancenorm"},
            r"norm_type.*'instancenorm'.*\(supported",
        ),
    ],
)
def test_unsupported_settings_are_rejected_by_name(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        opened(tmp_path, **fields)


def test_accepts_synonymous_config_values(tmp_path):
    loaded = opened(tmp_path, scaling=True, positional_encoding_type="random", distribution_output="normal")
    assert loaded.model.config.series.scaling == "mean"
    norms = loaded.params["encoder"]["layers"]["slot_0"]["attention_norm"]
    assert sorted(norms) == ["bias", "mean", "scale", "variance"]
