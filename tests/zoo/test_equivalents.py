"""Models that no family can describe directly: the equivalent model that is saved computes the same function."""

import jax
import numeric_parts
import numpy as np
import pytest
from golden import case as golden_case

from transformer.config import ConfigError, LayerKind, QKNorm, RotaryOptions, SinusoidalOptions, TransformerConfig
from transformer.nn.models import CausalLM, Classifier, MaskedLM, Seq2Seq, VisionClassifier
from transformer.zoo import ENTRIES, choose_family, load_pretrained, save_pretrained, with_equivalent
from transformer.zoo._equivalents import REWRITES

SIZES = {"vocab_size": 29, "d_model": 12, "num_heads": 3, "num_layers": 2, "feed_forward.d_ff": 17}
WITHOUT = {"stack.period": (LayerKind(self_attention=False),)}

# Difference from a family: model class, config fields, requested family (None: any), and the family that is found.
CASES = {
    "relu2": (
        CausalLM,
        {
            "feed_forward.activation": "relu2",
            "parameters.use_bias": False,
            "norm.kind": "rms_norm",
            "attention.qk_norm": QKNorm(),
        },
        None,
        "qwen3",
    ),
    "relu2 with biases": (CausalLM, {"feed_forward.activation": "relu2", "norm.kind": "rms_norm"}, None, "llama"),
    "norms without biases": (
        CausalLM,
        {"parameters.use_bias": False, "norm.kind": "layer_norm_without_bias"},
        None,
        "starcoder2",
    ),
    "no attention": (CausalLM, WITHOUT, None, "gpt_neox"),
    "no attention in some": (CausalLM, {"stack.prefix": WITHOUT["stack.period"]}, None, "gpt_neox"),
    "sinusoids": (CausalLM, {"position": SinusoidalOptions()}, None, "gpt2"),
    "sines first": (CausalLM, {"position": SinusoidalOptions(halves=True)}, None, "gpt2"),
    "epsilon": (CausalLM, {"position": SinusoidalOptions(), "norm.epsilon": 0.03}, "opt", "opt"),
    "epsilon, untied": (
        CausalLM,
        {"position": SinusoidalOptions(), "norm.epsilon": 0.03, "embedding.tie": False, "embedding.scale": False},
        "opt",
        "opt",
    ),
    "epsilon behind, untied": (
        CausalLM,
        {"position": SinusoidalOptions(), "norm.epsilon": 0.03, "norm.position": "post", "embedding.tie": False},
        "opt",
        "opt",
    ),
    "two stacks": (
        Seq2Seq,
        {"position": SinusoidalOptions(), "norm.epsilon": 0.03, "stack.num_decoder_layers": 3},
        None,
        "blenderbot",
    ),
    "the paper": (
        Seq2Seq,
        {"position": SinusoidalOptions(), "norm.position": "post", "norm.epsilon": 0.03},
        None,
        "marian",
    ),
    "the paper, a pattern and two vocabularies": (
        Seq2Seq,
        {
            "position": SinusoidalOptions(),
            "norm.position": "post",
            "stack.suffix": (LayerKind(),),
            "embedding.source_vocab_size": 31,
        },
        None,
        "marian",
    ),
}
INPUTS = {
    CausalLM: (np.array([[3, 1, 4, 1, 5, 9, 2]]),),
    Seq2Seq: (np.array([[3, 1, 4, 1, 5, 9, 2]]), np.array([[2, 7, 1, 8]])),
}


def random_model(cls, fields):
    """Return a model and parameters that all differ from their initial values."""
    model = cls(TransformerConfig(**SIZES | {"position": RotaryOptions()} | fields))
    return model, numeric_parts.random_params(model, *INPUTS[cls])["params"]


def equivalent(model, params, **options):
    """Call with_equivalent, with all rewrites of the parameters in one program."""
    found = []

    @jax.jit
    def run(params):
        equal, changed = with_equivalent(model, params, **options)
        found.append(equal)
        return changed

    changed = run(params)
    return found[0], changed


SLOW = {"the paper, a pattern and two vocabularies", "two stacks"}


@pytest.mark.programs(9, reason="it rewrites, runs, saves and loads a model")
@pytest.mark.default_cases(4)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in CASES])
def test_an_equivalent_model_gives_the_same_logits_and_is_saved(tmp_path, name):
    cls, fields, family, found = CASES[name]
    model, params = random_model(cls, fields)
    with pytest.raises(ConfigError, match="no counterpart"):
        choose_family(model, family)
    equal, changed = equivalent(model, params, family=family)
    save_pretrained(equal, changed, tmp_path / "out", family=family)
    again = load_pretrained(tmp_path / "out")
    assert again.family.name == found
    expected = jax.jit(model.apply)({"params": params}, *INPUTS[cls])
    got = jax.jit(again.model.apply)({"params": again.params}, *INPUTS[cls])
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_a_model_that_matches_a_family_is_unchanged():
    model, params = random_model(CausalLM, {"embedding.scale": False})
    assert with_equivalent(model, params) == (model, params)


def test_a_position_table_has_the_context_length_of_the_model():
    model, params = random_model(CausalLM, {"position": SinusoidalOptions()})
    equal, changed = equivalent(model, params, context=700)
    assert equal.config.max_length == changed["decoder"]["position_table"].shape[0] == 700
    assert equivalent(model, params)[0].config.max_length == 512


@pytest.mark.parametrize(
    ("cls", "fields", "message"),
    [
        (Seq2Seq, {"norm.kind": "rms_norm"}, r"\w+.*RotaryOptions"),
        (CausalLM, WITHOUT | {"norm.position": "post"}, "in layer 0 of the "),
        (MaskedLM, {"position": SinusoidalOptions()}, r"output.transform"),
        (Classifier, {"position": None, "output.num_classes": 2}, r"output.pooling.*'mean'.*GPT-2.*'last'"),
        (VisionClassifier, {"position": None, "output.num_classes": 2}, "ViT has no counterpart"),
    ],
)
def test_a_model_without_an_equivalent_is_a_short_error(cls, fields, message):
    model = cls(TransformerConfig(**SIZES | {"position": RotaryOptions()} | fields))
    with pytest.raises(ConfigError, match=message) as error:
        with_equivalent(model, {})
    assert str(error.value).startswith("the model can't be saved as any supported architecture")
    assert str(error.value).count(";") <= 5
    assert len(str(error.value)) < 700


def test_every_rewrite_is_needed_by_a_case():
    """Without any one of the rewrites, some case has no family."""
    needed = set()
    for cls, fields, family, _ in CASES.values():
        model = cls(TransformerConfig(**SIZES | {"position": RotaryOptions()} | fields))
        for rewrite in REWRITES:
            config = rewrite.config(model, 512)
            if config is not None:
                needed.add(rewrite)
                model = model.clone(config=config)
                try:
                    choose_family(model, family)
                except ConfigError:
                    continue
                break
    assert needed == set(REWRITES)


@pytest.mark.parametrize("family", ENTRIES)
def test_null_is_written_only_where_the_reference_accepts_it(family):
    """Null is written only for fields for which the reference accepts it, with any defaults of a config."""
    free = {
        "parameters.initializer_range": None,
        "feed_forward.d_ff": None,
        "attention.num_kv_heads": None,
        "attention.head_dim": None,
        "attention.value_dim": None,
    }
    free |= {"embedding.token_types": None, "output.softcap": None, "attention.softcap": None, "output.bias": None}
    for name, case in golden_case.cases(family).items():
        if not case.golden:
            continue
        head = ENTRIES[family].heads[case.architecture]
        config = ENTRIES[family].read(golden_case.golden(family)[name]["config"], head)
        for changes in ({}, *({field: None} for field in free)):
            values = written(ENTRIES[family], config, changes, case.architecture)
            assert {(family, field) for field, value in values.items() if value is None} <= golden_case.NULLABLE


def written(family, config, changes, architecture):
    """Return the config.json of a changed model, or an empty one if the family or the config does not allow it."""
    try:
        return family.write(config.replace(**changes), architecture)
    except ConfigError:
        return {}
