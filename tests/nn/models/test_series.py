"""Classes, targets and reconstructed patches of time series."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from numeric_parts import random_params

from transformer.config import ConfigError, FeedForwardOptions, Series, TransformerConfig
from transformer.inference import classify, classify_series, open_model
from transformer.nn.models import Forecaster, PatchReconstructor, SeriesClassifier, SeriesEncoder, SeriesRegressor
from transformer.zoo import load_pretrained

SERIES = Series(channels=3, context_length=13, patch_length=4, patch_stride=3, pooling="mean")
CONFIG = TransformerConfig(
    d_model=12, num_layers=1, num_heads=3, feed_forward=FeedForwardOptions(d_ff=17, activation="gelu_erf"), input=SERIES
)
NUMBERS = np.random.default_rng(1).normal(size=(2, 13, 3)).astype(np.float32)
VALUES = jax.device_put(NUMBERS)
MASKED = np.zeros((2, 3, 4), bool)
MASKED[0, 1, 2] = True


def initialized(model):
    return random_params(model, VALUES)


def plus(values, place, number):
    """Return a copy of the values with `number` added at one place."""
    changed = np.array(values)
    changed[place] += number
    return changed


@pytest.mark.parametrize("pooling", ["mean", "max", "flatten", "class_token"])
def test_a_class_depends_on_all_channels_in_order(pooling):
    changes = {"class_token": True, "pooling": "flatten"} if pooling == "class_token" else {"pooling": pooling}
    config = CONFIG.replace(input=dataclasses.replace(SERIES, **changes), **{"output.num_classes": 5})
    model = SeriesClassifier(config)
    variables = initialized(model)
    call = jax.jit(model.apply)
    plain = np.asarray(call(variables, VALUES))
    assert plain.shape == (2, 5)
    assert plain.dtype == jnp.float32
    for channel in range(3):
        assert np.abs(call(variables, plus(VALUES, (0, 7, channel), 1.0)) - plain).max(1)[0] > 1e-4
    assert not np.allclose(call(variables, NUMBERS[:, :, ::-1]), plain, atol=1e-3)


def test_regression_targets_stay_in_their_range():
    variables = initialized(SeriesRegressor(CONFIG.replace(**{"output.num_targets": 2})))
    limited = SeriesRegressor(CONFIG.replace(**{"output.num_targets": 2, "output.target_range": (-1.0, 4.0)}))
    free = limited.clone(config=limited.config.replace(**{"output.target_range": None}))
    large = jax.tree.map(lambda leaf: 300 * np.asarray(leaf), variables)
    assert np.abs(jax.jit(free.apply)(large, VALUES)).max() > 4
    call = jax.jit(limited.apply)
    found = np.asarray(call(large, VALUES))
    assert found.shape == (2, 2)
    assert (found >= -1).all()
    assert (found <= 4).all()
    zero = jax.tree.map(np.zeros_like, variables["params"]["output"])
    middle = call({"params": variables["params"] | {"output": zero}}, VALUES)
    np.testing.assert_allclose(middle, 1.5)


def test_a_masked_patch_is_hidden_and_predicted():
    """The prediction does not depend on the values of the masked patch that belong to no other patch."""
    series = dataclasses.replace(SERIES, patch_stride=4, context_length=16, scaling="none", class_token=False)
    model = PatchReconstructor(CONFIG.replace(input=series))
    values = np.random.default_rng(0).normal(size=(2, 16, 3)).astype(np.float32)
    variables = random_params(model, values)
    call = jax.jit(model.apply)
    changed = plus(values, (0, 9, 1), 3.0)  # in patch 2 of channel 1
    masked, other = call(variables, values, masked=MASKED), call(variables, changed, masked=MASKED)
    assert masked.shape == (2, 3, 4, 4)
    np.testing.assert_array_equal(masked, other)
    assert np.abs(np.asarray(call(variables, changed)) - call(variables, values)).max() > 1e-3
    targets = jax.jit(functools.partial(model.apply, method="targets"))(variables, values)
    np.testing.assert_array_equal(targets, values.reshape(2, 4, 4, 3).transpose(0, 3, 1, 2))


def test_the_class_token_is_not_a_patch():
    config = CONFIG.replace(input=dataclasses.replace(SERIES, class_token=True, pooling="flatten"))
    for model, positions in ((PatchReconstructor(config), 4), (SeriesEncoder(config), 5)):
        assert (
            jax.eval_shape(lambda model=model: model.init_with_output(jax.random.key(0), VALUES)[0]).shape[2]
            == positions
        )


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("model", "masked", "message"),
    [
        (SeriesClassifier, None, r"output.num_classes.*SeriesClassifier"),
        (SeriesRegressor, None, r"output.num_targets.*SeriesRegressor"),
        (Forecaster, None, r"input.horizon"),
        (
            PatchReconstructor,
            MASKED[:, :, 1:],
            r"masked.*\(2.*3.*4\)",
        ),
        (PatchReconstructor, MASKED.astype(np.int32), r"got int32.*\(2.*3.*4\)"),
    ],
)
def test_missing_settings_are_named(model, masked, message):
    with pytest.raises((ValueError, ConfigError), match=message):
        jax.eval_shape(lambda: model(CONFIG).init(jax.random.key(0), VALUES, masked=masked))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    record = golden_case.golden("patchtst")["classifier"]
    names = {"id2label": {"0": "walk", "1": "run", "2": "sit", "3": "fall"}}
    return ours.write(tmp_path_factory.mktemp("series") / "classes", record | {"config": record["config"] | names})


def test_classes_of_series_have_names(directory):
    """As many series as the last batch has not: the classes are those of the logits, whatever the batch."""
    opened = open_model(directory)
    values = golden_case.past_values(17, 3)
    logits = np.asarray(golden_case.golden("patchtst")["classifier"]["results"]["logits"])
    expected = [["walk", "run", "sit", "fall"][row.argmax()] for row in logits]
    found = opened.classify(values)
    assert [one.label for one in found] == expected
    np.testing.assert_allclose(
        list(found[0].probabilities.values()), np.exp(logits[0]) / np.exp(logits[0]).sum(), atol=1e-4
    )
    assert opened.classify(values[1]) == classify_series(opened, [values[1]])[0]
    many = classify_series(opened, np.tile(values, (33, 1, 1)))
    assert [one.label for one in many] == expected * 33


@pytest.mark.usefixtures("without_type_checks")
def test_rejects_invalid_classifier_inputs(directory, tmp_path):
    opened = open_model(directory)
    with pytest.raises(ValueError, match="there are no series"):
        classify_series(opened, [])
    with pytest.raises(ValueError, match=r"series.*\(batch.*17.*3\)"):
        classify_series(opened, np.zeros((2, 16, 3)))
    with pytest.raises(ConfigError, match="classify_series"):
        classify(opened, ["a text"])
    forecaster = open_model(ours.write(tmp_path / "other", golden_case.golden("patchtst")["forecast"]))
    with pytest.raises(ConfigError, match="of the class Forecaster, which does not classify time series"):
        classify_series(forecaster, np.zeros((1, 17, 3)))


def test_the_encoder_loads_without_a_different_head(directory):
    encoder = load_pretrained(directory, architecture="PatchTSTModel")
    assert type(encoder.model) is SeriesEncoder
    whole = load_pretrained(directory)
    assert encoder.params.keys() == whole.params.keys() - {"output"}
    values = np.asarray(golden_case.past_values(17, 3), np.float32)
    np.testing.assert_array_equal(
        jax.jit(encoder.model.apply)({"params": encoder.params}, values),
        jax.jit(functools.partial(whole.model.apply, method="hidden"))({"params": whole.params}, values),
    )
