"""The table of model kinds describes all classes of models."""

import flax.linen as nn
import pytest

from transformer.nn import models
from transformer.nn.models._kinds import MODEL_KINDS, ModelKind, kind_of

CLASSES = [one for one in map(vars(models).get, models.__all__) if isinstance(one, type) and issubclass(one, nn.Module)]


@pytest.mark.parametrize("model", CLASSES, ids=lambda model: model.__name__)
def test_every_model_kind_declares_its_inputs(model):
    assert kind_of(model.__new__(model)).reads


@pytest.mark.parametrize("kind", MODEL_KINDS.values(), ids=lambda kind: str(kind.reads))
def test_kind_fields_are_consistent(kind):
    assert {*kind.embeds, *kind.inspects} <= {*kind.reads}
    assert kind.classifies in (None, *kind.reads)
    assert kind.predicts_tokens or kind.writes in (None, "characters")
    assert not kind.image_prompts or kind.reads == ("text", "images")


def test_a_subclass_has_the_kind_of_its_base_class():
    class Own(models.CausalLM):
        pass

    assert kind_of(Own.__new__(Own)) is MODEL_KINDS[models.CausalLM]
    assert kind_of(object()) == ModelKind()
