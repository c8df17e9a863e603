"""`complete_recipe`: what the data, a pretrained model and an existing run fill in, and that it does so only once."""

import jax
import numpy as np
import pytest
from training_recipes import change, record_drawn_run, short_recipe

from transformer.config import ConfigError, FeedForwardOptions, TransformerConfig
from transformer.data import LabeledText, TokenizerConfig, prepare
from transformer.training._completion import complete_recipe
from transformer.training._start import Start
from transformer.training._state import initial_params
from transformer.training.workdir._runs import open_run

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A recipe of a classifier that leaves vocabulary, labels and classes open."""
    path = tmp_path_factory.mktemp("data") / "texts.tsv"
    path.write_text("sentence\tlabel\n" + "".join(f"text {i}\t{('no', 'yes')[i % 2]}\n" for i in range(20)))
    model = TransformerConfig(d_model=8, num_layers=1, num_heads=1, feed_forward=FeedForwardOptions(d_ff=8))
    return short_recipe("texts", model, LabeledText(path=str(path), tokenizer=TokenizerConfig(kind="word")))


@pytest.fixture(scope="module")
def dataset(given):
    return prepare(given.data)


@pytest.fixture(scope="module")
def whole(given, dataset):
    return complete_recipe(given, data=dataset)


@pytest.fixture(scope="module")
def start(whole):
    """A model like that of the recipe, without a head."""
    shapes = jax.eval_shape(lambda: initial_params(whole))
    params = {
        name: jax.tree.map(lambda leaf: np.zeros(leaf.shape), shapes[name]) for name in shapes if name != "output"
    }
    config = whole.model.replace(**{"dropout_rate": 0.5, "output.num_classes": None})
    return Start("there", "a model", config, params, tokenizer=None)


def test_the_data_decides_vocabulary_labels_and_classes(given, dataset, whole):
    assert (given.model.vocab_size, given.data.labels, given.model.output.num_classes) == (None, (), None)
    model = given.model.replace(**{"vocab_size": dataset.tokenizer.vocab_size, "output.num_classes": 2})
    assert whole == change(given, data={"labels": ("no", "yes")}, model=vars(model))
    assert complete_recipe(whole, data=dataset) == whole
    with pytest.raises(ConfigError, match=r"output.num_classes is 3, but the data has 2 labels \(no, yes\)"):
        complete_recipe(change(given, model={"output.num_classes": 3}), data=dataset)


def test_a_run_decides_the_same_before_the_data_is_read(given, dataset, whole):
    faster = change(given, optimizer={"learning_rate": 0.5})
    for known in ({"old": whole}, {"old": whole, "data": dataset}):
        assert complete_recipe(given, **known) == complete_recipe(whole, **known) == whole
        assert complete_recipe(faster, **known) == change(whole, optimizer={"learning_rate": 0.5})


def test_a_model_decides_all_but_the_fields_of_the_recipe(given, dataset, whole, start):
    before = complete_recipe(given, start=start)
    assert (before.model, before.origin.source) == (start.config.replace(dropout_rate=0.0), "there")
    found = complete_recipe(before, start=start, data=dataset)
    assert found.model == whole.model
    assert found.origin.new == ("output/bias", "output/kernel")
    assert complete_recipe(given, old=found) == found, "resumed without the model"
    assert complete_recipe(found, start=start, old=found, data=dataset) == found


def test_a_run_without_recipe_json_uses_the_recipe_of_its_checkpoint(given, dataset, start, tmp_path):
    found = complete_recipe(given, start=start, data=dataset)
    workdir = record_drawn_run(found, tmp_path / "run", [3])
    (workdir / "recipe.json").unlink()
    assert open_run(given, workdir, say=print)[0] == found
