"""Every family: comparison with golden results of the reference (tests/golden), and a round trip of its files."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numeric_parts
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours
from property_parts import rounding

from transformer.__main__ import main
from transformer.config import (
    ConfigError,
    EmbeddingOptions,
    HeadTransform,
    LearnedOptions,
    RotaryOptions,
    TransformerConfig,
)
from transformer.generate import Sampling, generate
from transformer.nn import quantize
from transformer.nn._caches import cache_length
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, Embedder, MaskedLM, Seq2Seq, VisionLanguageModel, count_parameters
from transformer.nn.quantization._adapted import Encoded
from transformer.zoo import (
    ENTRIES,
    abstract_params,
    build,
    choose_family,
    load_pretrained,
    save_pretrained,
    with_plain_embeddings,
)
from transformer.zoo.weights._files import WeightFiles


def head_of(family, name):
    return ENTRIES[family].heads[golden_case.cases(family)[name].architecture]


# The first case and variant of each family run by default; the others are slow tests.
CASES = [
    pytest.param(family, name, id=f"{family}-{name}", marks=pytest.mark.slow if number else ())
    for family in golden_case.families()
    for number, (name, case) in enumerate(golden_case.cases(family).items())
    if case.golden
]
# One family per kind of positions, and one with windows, run by default; the others are similar and are slow tests.
BY_DEFAULT = {"gpt2", "gemma3_text", "bloom", "t5"}
FIRST = [
    pytest.param(
        family, next(iter(golden_case.cases(family))), marks=() if family in BY_DEFAULT else pytest.mark.slow, id=family
    )
    for family in golden_case.families()
]
WRITERS = [one for one in FIRST if golden_case.golden(one.values[0])[one.values[1]]["generated"]]
SLOW = {("gemma3_text", "lm"), ("bloom", "lm")}
WRITERS = [
    pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) if one.values in SLOW else one for one in WRITERS
]
DECODERS = [one for one in WRITERS if head_of(*one.values).model is CausalLM]
VARIANTS = [
    pytest.param(name, variant, id=name, marks=pytest.mark.slow if number else ())
    for family in ENTRIES.values()
    for number, (name, variant) in enumerate(family.variants.items())
]


def opened(tmp_path, family, name):
    record = golden_case.golden(family)[name]
    return load_pretrained(ours.write(tmp_path / "theirs", record)), record


@pytest.mark.programs(9, reason="it loads, runs and saves a model")
@pytest.mark.default_cases(16)
@pytest.mark.parametrize(("family", "name"), CASES)
def test_results_equal_the_reference_and_files_survive_a_round_trip(tmp_path, family, name):
    case = golden_case.cases(family)[name]
    loaded, record = opened(tmp_path, family, name)
    ours.compare(ours.run(loaded.model, loaded.params, case, "none"), record["results"], "none", case)

    save_pretrained(loaded.model, loaded.params, tmp_path / "ours", family=loaded.family.name)
    again = load_pretrained(tmp_path / "ours")
    assert again.model.config == loaded.model.config
    assert again.architecture == loaded.architecture
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)
    saved = WeightFiles(tmp_path / "ours").tensors
    assert {name: list(tensor.shape) for name, tensor in saved.items()} == record["tensors"]


def test_every_family_has_a_golden_file():
    for family in ENTRIES:
        assert golden_case.golden_file(family).exists(), f"write tests/golden/cases/{family}.py and run make.py"


@pytest.mark.parametrize(("family", "name"), WRITERS)
def test_generation_equals_the_reference(tmp_path, family, name):
    loaded, record = opened(tmp_path, family, name)
    case, model = golden_case.cases(family)[name], loaded.model
    assert isinstance(model, CausalLM | Seq2Seq)
    prompt = np.asarray(ours.inputs_of(model, case, "none")[0][0])[:1].tolist()
    given = {"prompts": prompt}
    if isinstance(model, Seq2Seq):
        given = {"sources": prompt, "bos_id": loaded.fields["decoder_start_token_id"]}
    if isinstance(model, VisionLanguageModel):
        given["images"] = [ours.images_of(model)[0]]
    greedy = Sampling(temperature=0.0)
    rows = generate(model, loaded.params, **given, max_new_tokens=case.new_tokens, sampling=greedy)
    assert rows == record["generated"]


@pytest.mark.programs(9, reason="it decodes parts of four widths")
@pytest.mark.parametrize(("family", "name"), DECODERS)
def test_cached_is_uncached(tmp_path, family, name):
    """Prefill 1, 7 or all tokens, then decode the rest in one call or one by one; the second row has left padding."""
    case = golden_case.cases(family)[name]
    loaded, _ = opened(tmp_path, family, name)
    model, variables = loaded.model, {"params": loaded.params}
    (tokens,), named = ours.inputs_of(model, case, "left")
    mask, positions, tokens = named["mask"], np.asarray(named["positions"]), np.asarray(tokens)
    real = np.asarray(mask.query_segments).astype(bool)
    apply = jax.jit(lambda params, tokens, positions: model.apply({"params": params}, tokens, positions, mask))

    def run(params):
        return np.asarray(apply(params, tokens, positions))

    whole = run(loaded.params)
    # Effect of rounding the parameters on the logits: 9e-5 for gemma3_text, 4e-6 for bloom.
    noise = rounding(lambda params: run(params)[real], loaded.params)
    empty = jax.jit(lambda: model.init_cache(2, case.length))

    @jax.jit
    def step(cache, tokens, positions, start):
        width = tokens.shape[1]
        query = jax.lax.dynamic_slice_in_dim(mask.query_segments, start, width, axis=1)
        return model.apply(variables, tokens, positions, Mask.segments(query, mask.query_segments), cache)

    for widths in ((1, case.length - 1), (7, *[1] * (case.length - 7)), (case.length,)):
        cache, parts, start = empty(), [], 0
        for width in widths:
            logits, cache = step(cache, tokens[:, start : start + width], positions[:, start : start + width], start)
            parts.append(np.asarray(logits))
            start += width
        assert jax.jit(cache_length)(cache).tolist() == [case.length] * 2
        np.testing.assert_allclose(np.concatenate(parts, axis=1)[real], whole[real], atol=2e-5 + noise)


# With respect to the cache, the other families differ from T5 only in their positions.
@pytest.mark.programs(8, reason="it prefills three widths")
@pytest.mark.parametrize(
    "family", ["t5", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bart", "umt5", "marian"))]
)
def test_cached_is_uncached_after_a_source(tmp_path, family):
    """Prefill 1, 4 or all 7 target tokens, then decode three at a time; the source has right padding."""
    case = golden_case.cases(family)["lm"]
    loaded, _ = opened(tmp_path, family, "lm")
    model, variables = loaded.model, {"params": loaded.params}
    (source, target), named = ours.inputs_of(model, case, "right")
    target, empty = np.asarray(target), jax.jit(lambda: model.init_cache(2, 7))
    whole = np.asarray(jax.jit(model.apply)(variables, source, target, **named))
    step = jax.jit(lambda cache, source, target: model.apply(variables, source, target, cache=cache, **named))

    for widths in ((1, 3, 3), (4, 3), (7,)):
        cache, parts, start = empty(), [], 0
        for width in widths:
            logits, cache = step(cache, None if start else source, target[:, start : start + width])
            parts.append(np.asarray(logits))
            start += width
        np.testing.assert_allclose(np.concatenate(parts, axis=1), whole, atol=2e-5)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_named_variants_have_their_published_size(name, variant):
    model = build(name)
    assert count_parameters(abstract_params(model)) == variant.parameters


def test_loading_reports_every_mismatch(tmp_path):
    record = golden_case.golden("gpt2")["lm"]
    tensors = dict(record["tensors"])
    del tensors["transformer.h.1.ln_2.bias"]
    tensors["transformer.h.0.ln_1.weight"] = [13]
    tensors["transformer.h.2.ln_1.weight"] = [12]
    directory = ours.write(tmp_path / "broken", record | {"tensors": tensors})
    with pytest.raises(ValueError, match=r"1.*transformer.h.1.ln_2.bias") as error:
        load_pretrained(directory)
    assert "1 unexpected: transformer.h.2.ln_1.weight" in str(error.value)
    assert "transformer.h.0.ln_1.weight: expected (12,), got (13,)" in str(error.value)


def test_fields_that_change_the_mathematics_are_errors(tmp_path):
    record = golden_case.golden("gpt2")["lm"]
    fields = {"scale_attn_by_inverse_layer_idx": True, "activation_function": "mish", "wonder": 3}
    directory = ours.write(tmp_path / "strange", record | {"config": record["config"] | fields})
    with pytest.raises(ValueError, match="scale_attn_by_inverse_layer_idx") as error:
        load_pretrained(directory)
    assert "activation_function is 'mish'" in str(error.value)
    assert "wonder is not known" in str(error.value)
    del fields["activation_function"], fields["scale_attn_by_inverse_layer_idx"]
    fields["_model_name_or_path"] = "a note, as all names with an underscore in front"
    directory = ours.write(tmp_path / "free", record | {"config": record["config"] | fields})
    load_pretrained(directory, ignore_fields=["wonder"])
    values = json.loads((directory / "config.json").read_text())
    assert values["wonder"] == 3


@pytest.mark.programs(7, reason="it loads and saves models of two dtypes")
def test_loads_with_a_dtype_and_a_mesh(tmp_path):
    """Parameters have the dtype of the file or the requested one, and are sharded on a mesh by the rules."""
    loaded, _ = opened(tmp_path, "llama", "lm")
    half = load_pretrained(tmp_path / "theirs", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(half.params)} == {jnp.dtype("bfloat16")}
    save_pretrained(half.model, half.params, tmp_path / "half")
    again = load_pretrained(tmp_path / "half")
    assert again.model.config.dtype == "bfloat16"
    jax.tree.map(np.testing.assert_array_equal, again.params, half.params)

    from transformer.nn._sharding import make_mesh

    spread = load_pretrained(tmp_path / "theirs", mesh=make_mesh({"fsdp": 2, "data": -1}))
    jax.tree.map(np.testing.assert_array_equal, spread.params, loaded.params)
    kernel = spread.params["decoder"]["layers"]["slot_0"]["feed_forward"]["up"]["kernel"]
    assert kernel.addressable_shards[0].data.shape == (2, 6, 19)


def test_a_trained_model_is_saved_as_the_family_it_equals(tmp_path):
    model = build("gpt2")
    config = model.config.replace(
        vocab_size=11,
        d_model=12,
        num_heads=3,
        num_layers=1,
        position=LearnedOptions(max_length=9),
        **{"stack.period": model.config.stack.period},
    )
    model = CausalLM(config)
    params = jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype)), abstract_params(model))
    save_pretrained(model, params, tmp_path / "out", fields={"eos_token_id": 3})
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "gpt2"
    odd = CausalLM(dataclasses.replace(config, **{"norm.position": "post", "attention.softcap": 3.0}))
    with pytest.raises(ValueError, match="no counterpart") as error:
        save_pretrained(odd, params, tmp_path / "odd", family="gpt2")
    assert "norm.position is 'post'" in str(error.value)
    assert "attention.softcap is 3.0" in str(error.value)


def test_non_finite_parameters_are_not_written(tmp_path):
    loaded, _ = opened(tmp_path, "gpt2", "lm")
    table = np.array(loaded.params["embedding"]["embedding"])
    table[3, 1] = np.nan
    loaded.params["embedding"]["embedding"] = jax.device_put(table)
    with pytest.raises(ValueError, match=r"NaN.*embedding/embedding"):
        save_pretrained(loaded.model, loaded.params, tmp_path / "broken")
    assert not (tmp_path / "broken").exists()


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_with_a_folded_scale_give_the_same_logits(tied):
    sizes = {"vocab_size": 11, "d_model": 6, "num_heads": 3, "num_layers": 1, "feed_forward.d_ff": 5}
    model = CausalLM(TransformerConfig(**sizes, position=RotaryOptions(), embedding=EmbeddingOptions(tie=tied)))
    tokens = np.array([[3, 1, 4, 1, 5]])
    params = numeric_parts.random_params(model, tokens)["params"]
    plain, held = with_plain_embeddings(model, params)
    assert not plain.config.embedding.scale
    expected = jax.jit(model.apply)({"params": params}, tokens)
    np.testing.assert_allclose(jax.jit(plain.apply)({"params": held}, tokens), expected, rtol=1e-5, atol=1e-6)
    assert choose_family(plain)[0].name == "gpt_neox"


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Seq2Seq, {"feed_forward.activation": "relu2"}),
        (Embedder, {"feed_forward.activation": "relu2"}),
        (MaskedLM, {"output.transform": HeadTransform(activation="relu2", norm=True)}),
    ],
)
def test_rejects_an_activation_that_no_family_has(tmp_path, cls, fields):
    model = cls(TransformerConfig(vocab_size=7, d_model=8, num_layers=1, num_heads=2, **fields))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(model))
    with pytest.raises(ConfigError, match="no counterpart"):
        save_pretrained(model, params, tmp_path / "out")


def test_a_field_of_one_family_is_not_written_to_another(tmp_path, capsys):
    directory = ours.write(tmp_path / "opt", golden_case.golden("opt")["lm"])
    assert main(["convert", str(directory), str(tmp_path / "gpt2"), "--family", "gpt2"]) == 0, capsys.readouterr().err
    before, after = (load_pretrained(path).model.config.max_length for path in (directory, tmp_path / "gpt2"))
    assert before == after


@pytest.mark.programs(75, reason="`quantize` reports the errors of each parameter, so it can't run in jax.jit")
@pytest.mark.default_cases(4)
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize(("family", "name"), WRITERS)
def test_quantized_generation_chooses_the_likeliest_token(tmp_path, family, name, bits):
    """Decoding stores 8-bit and 16-bit kernels in another form (`nn/quantization`); a whole pass does not."""
    loaded, _ = opened(tmp_path, family, name)
    case, model, params = golden_case.cases(family)[name], loaded.model, loaded.params
    prompt = np.asarray(ours.inputs_of(model, case, "none")[0][0])[:1].tolist()
    given = {"prompts": prompt}
    if isinstance(model, Seq2Seq):
        given = {"sources": prompt, "bos_id": loaded.fields["decoder_start_token_id"]}
    if isinstance(model, VisionLanguageModel):
        given["images"] = [ours.images_of(model)[0]]
    if bits == 8:
        params, _ = quantize(params)
    else:  # float32 activations, so that only the weights are rounded
        params = jax.tree.map(lambda leaf: jax.device_put(np.asarray(leaf).astype(jnp.bfloat16)), params)
        model = type(model)(model.config.replace(**{"parameters.dtype": "bfloat16"}), model.execution)
    greedy = Sampling(temperature=0.0)
    rows = generate(model, params, **given, max_new_tokens=3, sampling=greedy)

    def plain(leaf):
        return leaf.array() if isinstance(leaf, Encoded) else leaf.astype(jnp.float32)

    whole = jax.jit(lambda params: jax.tree.map(plain, params, is_leaf=lambda leaf: isinstance(leaf, Encoded)))(params)
    assert rows == generate(loaded.model, whole, **given, max_new_tokens=3, sampling=greedy)
