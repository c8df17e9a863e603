"""Encoder families: additional contents of published files and configs, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden import case as golden_case
from golden import ours

from transformer.config import LayerKind
from transformer.nn._masks import Mask
from transformer.nn.models import Classifier, Embedder, MaskedLM
from transformer.zoo import ENTRIES, abstract_params, build, choose_family, load_pretrained, save_pretrained
from transformer.zoo.families._bert import REPEATED
from transformer.zoo.families._vit import CONVOLUTION
from transformer.zoo.weights._files import WeightFiles, write_weights
from transformer.zoo.weights._rules import row, without_first


def tensors_of(record):
    return {name: golden_case.numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}


def same(left, right):
    jax.tree.map(np.testing.assert_array_equal, left, right)


def first_release(tensors):
    """Masked-language-model tensors as in bert-base-uncased: old names, copies, unneeded heads."""
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    more = {
        "bert.pooler.dense.weight": np.ones((12, 12), np.float32),
        "bert.pooler.dense.bias": np.ones(12, np.float32),
        "cls.seq_relationship.weight": np.ones((2, 12), np.float32),
        "cls.seq_relationship.bias": np.ones(2, np.float32),
        "bert.embeddings.position_ids": np.arange(13)[None],
        "cls.predictions.decoder.weight": old["bert.embeddings.word_embeddings.weight"],
        "cls.predictions.decoder.bias": old["cls.predictions.bias"],
    }
    return old | more


def test_reads_files_of_the_original_bert(tmp_path):
    record = golden_case.golden("bert")["masked_lm"]
    tensors = tensors_of(record)
    write_weights(tmp_path / "new", record["config"], tensors)
    write_weights(tmp_path / "old", record["config"], first_release(tensors))
    new, old = load_pretrained(tmp_path / "new"), load_pretrained(tmp_path / "old")
    same(old.params, new.params)
    base = load_pretrained(tmp_path / "old", architecture="BertModel")
    assert isinstance(base.model, Embedder)
    pooler = {"dense": {"kernel": jnp.ones((12, 12)), "bias": jnp.ones(12)}}
    shared = {name: new.params[name] for name in ("embedding", "token_type_embedding", "encoder")}
    same(base.params, shared | {"pooler": pooler})
    with pytest.raises(ValueError, match=r"2.*classifier.weight.*classifier.bias"):
        load_pretrained(tmp_path / "old", architecture="BertForSequenceClassification")


def test_missing_masked_lm_parameters_are_an_error(tmp_path):
    record = golden_case.golden("bert")["masked_lm"]
    tensors = first_release(tensors_of(record))
    tensors["cls.predictions.transform.LayerNorm.weight"] = np.ones(12, np.float32)
    tensors["cls.predictions.decoder.bias"] = np.ones(37, np.float32)
    tensors["classifier.weight"] = np.ones((3, 12), np.float32)
    write_weights(tmp_path / "odd", record["config"], tensors)
    with pytest.raises(ValueError, match=r"cls.predictions.decoder.bias.*cls.predictions.bias") as error:
        load_pretrained(tmp_path / "odd")
    assert "2 unexpected: classifier.weight, cls.predictions.transform.LayerNorm.gamma" in str(error.value)


def test_base_model_files_are_read_with_and_without_prefix(tmp_path):
    record = golden_case.golden("bert")["base"]
    loaded = load_pretrained(ours.write(tmp_path / "bare", record))
    write_weights(
        tmp_path / "prefixed", record["config"], {f"bert.{name}": t for name, t in tensors_of(record).items()}
    )
    same(load_pretrained(tmp_path / "prefixed").params, loaded.params)
    save_pretrained(loaded.model, loaded.params, tmp_path / "saved")
    assert "embeddings.word_embeddings.weight" in WeightFiles(tmp_path / "saved").tensors


def test_an_embedding_is_the_mean_of_non_padding_tokens(tmp_path):
    record = golden_case.golden("bert")["base"]
    loaded, case = load_pretrained(ours.write(tmp_path / "base", record)), golden_case.cases("bert")["base"]
    (tokens,), named = ours.inputs_of(loaded.model, case, "right")

    @jax.jit
    def run(params, tokens, named):
        hidden = loaded.model.apply({"params": params}, tokens, **named, method="hidden")
        return hidden, loaded.model.apply({"params": params}, tokens, **named)

    hidden, vectors = run(loaded.params, tokens, named)
    expected = np.asarray(record["results"]["hidden"])[0].mean(0)  # the row without padding, from the reference
    vectors = np.asarray(vectors)
    np.testing.assert_allclose(vectors[0], expected, atol=1e-5)
    np.testing.assert_allclose(vectors[1], np.asarray(hidden)[1, : case.length - golden_case.PADDED].mean(0), atol=1e-6)


@pytest.mark.programs(9, reason="it loads and runs two models, and saves and loads them again")
def test_a_pooler_in_the_files_is_read_and_saved(tmp_path):
    """The vectors of a call, and so those of sentence encoders, do not depend on the pooler."""
    golden = golden_case.golden("bert")
    plain = load_pretrained(ours.write(tmp_path / "plain", golden["base"]))
    found = load_pretrained(ours.write(tmp_path / "pooler", golden["pooler"]))
    assert plain.model.config.output.pooler is None
    pooler = found.params["pooler"]["dense"]
    np.testing.assert_array_equal(np.asarray(pooler["kernel"]).T, golden_case.numbers("pooler.dense.weight", (12, 12)))
    same({name: found.params[name] for name in plain.params}, plain.params)
    (tokens,), named = ours.inputs_of(found.model, golden_case.cases("bert")["pooler"], "right")
    vectors = [jax.jit(one.model.apply)({"params": one.params}, tokens, **named) for one in (plain, found)]
    np.testing.assert_array_equal(*vectors)
    for one in (plain, found):
        place = save_pretrained(one.model, one.params, tmp_path / "saved" / one.directory.name)
        assert WeightFiles(place).tensors.keys() == WeightFiles(one.directory).tensors.keys()
        again = load_pretrained(place)
        assert again.model.config == one.model.config
        same(again.params, one.params)
    hidden = np.ones((1, 2, 12), np.float32)
    with pytest.raises(ValueError, match=r"output.pooler"):
        jax.eval_shape(
            lambda hidden: plain.model.apply({"params": plain.params}, hidden, method="pooler_output"), hidden
        )


def test_unused_position_rows_are_dropped(tmp_path):
    record = golden_case.golden("roberta")["masked_lm"]
    name = "roberta.embeddings.position_embeddings.weight"
    table = tensors_of(record)[name]
    loaded = load_pretrained(ours.write(tmp_path / "theirs", record))
    np.testing.assert_array_equal(loaded.params["encoder"]["position_table"], table[2:])
    save_pretrained(loaded.model, loaded.params, tmp_path / "ours", family="roberta")
    saved = WeightFiles(tmp_path / "ours").read(name)
    np.testing.assert_array_equal(saved, np.concatenate([np.zeros((2, 12)), table[2:]]))


@pytest.mark.parametrize(
    ("relation", "shape", "tensors"),
    [
        (REPEATED, (5,), [(5,), (5,)]),
        (without_first(2), (5, 3), [(7, 3)]),
        (CONVOLUTION, (2, 2, 3, 7), [(7, 3, 2, 2)]),
        (row(2), (5,), [(1, 1, 5)]),
    ],
)
def test_relative_position_settings_survive_a_round_trip(relation, shape, tensors):
    parameter = np.random.RandomState(0).standard_normal(shape).astype(jnp.bfloat16)
    assert relation.tensor_shapes([shape]) == tensors
    saved = relation.save([parameter])
    assert [tensor.shape for tensor in saved] == tensors
    assert {tensor.dtype for tensor in saved} == {parameter.dtype}
    np.testing.assert_array_equal(relation.load(saved, [shape])[0], parameter)


MODERNBERT = {
    "architectures": ["ModernBertForMaskedLM"],
    "classifier_pooling": "mean",
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_size": 768,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "model_type": "modernbert",
    "num_hidden_layers": 22,
    "position_embedding_type": "absolute",
}


def test_the_published_modernbert_config_equals_the_defaults():
    family = ENTRIES["modernbert"]
    head = family.heads["ModernBertForMaskedLM"]
    config = family.read(MODERNBERT, head)
    assert config == build("modernbert-base").config
    everywhere, window = LayerKind(), LayerKind(window=65, rotary_base=10_000.0)
    assert config.stack.prefix == (LayerKind(attention_norm=False),)
    assert config.stack.period == (window, window, everywhere)
    written = family.write(config, "ModernBertForMaskedLM")
    assert written["layer_types"] == (["full_attention", "sliding_attention", "sliding_attention"] * 8)[:22]
    assert written["local_attention"] == 128
    assert written["rope_parameters"]["full_attention"]["rope_theta"] == 160_000.0
    assert family.read(MODERNBERT | {"local_rope_theta": None}, head).stack.period[0].rotary_base == 160_000.0


REFUSED = [
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
    ("bert", {"is_decoder": True}, "is_decoder is True"),
    ("bert", {"hidden_act": "mish"}, "hidden_act is 'mish'"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id is 0"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling is {"),
    ("modernbert", {"layer_types": ["full_attention"]}, "for each of 22 layers"),
    ("modernbert", {"layer_types": ["blockwise_attention"] * 22}, "layer_types must be full_attention or sliding"),
    (
        "modernbert",
        {"rope_parameters": {"full_attention": {"partial_rotary_factor": 0.5}}},
        "partial_rotary_factor of full_attention is 0.5",
    ),
    ("vit", {"patch_size": [2, 4]}, "only square patches"),
    ("vit", {"image_size": 15}, "must be a multiple of patch_size"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_rejects_unsupported_fields(name, fields, message):
    family = ENTRIES[name]
    sizes = {"vocab_size": 37} if name in ("bert", "roberta") else {}
    head = next(iter(family.heads.values()))
    family.read(sizes, head)
    with pytest.raises(ValueError, match=message.replace("{", r"\{")):
        family.read(sizes | fields, head)


def test_rejects_a_vision_model_with_a_different_head():
    with pytest.raises(ValueError, match=r"ViTForMaskedImageModeling.*ViT"):
        ENTRIES["vit"].head_of({"architectures": ["ViTForMaskedImageModeling"]})


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("clip", {"text_config": {"vocab_size": 40, "eos_token_id": 7}}, r"text_config.*eos_token_id.*7"),
        ("clip", {"text_config": {"hidden_act": "mish"}}, r"text_config.*hidden_act.*'mish'"),
        ("clip", {"vision_config": {"wonder": 3}}, r"vision_config"),
        ("clip", {"vision_config": [3]}, r"vision_config"),
        ("siglip", {"vision_config": {"vision_use_head": False}}, r"vision_config.*vision_use_head"),
        ("siglip", {"text_config": {"projection_size": 5}}, r"d_model"),
        ("dinov2", {"hidden_act": "mish"}, r"hidden_act.*'mish'"),
        ("dinov2_with_registers", {"num_register_tokens": 0}, r"num_register_tokens.*0"),
        ("dinov2_with_registers", {"use_mask_token": False}, r"use_mask_token"),
        ("dinov3_vit", {}, r"num_register_tokens.*0"),
        ("dinov3_vit", {"num_register_tokens": 4, "num_attention_heads": 64}, "must be a multiple of 4"),
        ("dinov3_vit", {"num_register_tokens": 4, "rope_scaling": {"factor": 2}}, r"rope_scaling"),
        ("vit", {"architectures": ["ViTModel"], "pooler_act": "relu"}, r"pooler_act.*'relu'"),
    ],
)
def test_rejects_unsupported_fields_of_vision_families(family, fields, message):
    entry = ENTRIES[family]
    with pytest.raises(ValueError, match=message):
        entry.read(fields, entry.head_of(fields)[1])


def test_older_files_of_clip_repeat_the_configs():
    entry = ENTRIES["clip"]
    fields = {"text_config": {"num_hidden_layers": 3}, "text_config_dict": {"num_hidden_layers": 5}}
    config = entry.read(fields | {"vision_config": None, "vision_config_dict": None}, entry.heads["CLIPModel"])
    assert (config.num_layers, config.images.encoder.num_layers) == (5, 12)


@pytest.mark.parametrize(
    ("variant", "model", "changes", "message"),
    [
        ("bert-base-uncased", Embedder, {"output.pooling": "first", "output.transform": None}, r"pooling.*'first'"),
        ("bert-base-uncased", MaskedLM, {"feed_forward.activation": "relu"}, r"activation.*'relu'"),
        ("roberta-base", Classifier, {"output.num_classes": 3, "output.transform": None}, r"output.transform"),
        (
            "modernbert-base",
            MaskedLM,
            {"stack.suffix": (LayerKind(window=7),), "num_layers": 23},
            "layers is",
        ),
        ("vit-base-patch16-224", None, {"attention.biases": ("query", "out")}, "attention.biases is"),
    ],
)
def test_models_without_a_counterpart_are_not_saved(variant, model, changes, message):
    known = build(variant)
    changed = (model or type(known))(known.config.replace(**changes))
    family = next(family.name for family in ENTRIES.values() if variant in family.variants)
    with pytest.raises(ValueError, match=message):
        choose_family(changed, family)


def test_right_padding_does_not_change_windows(tmp_path):
    """The windows of ModernBERT count slots, so the padding must come after all tokens."""
    record = golden_case.golden("modernbert")["masked_lm"]
    loaded = load_pretrained(ours.write(tmp_path / "theirs", record))
    tokens = golden_case.tokens(3, 37, 1, 11)

    @jax.jit
    def apply(params, tokens, lengths):
        return loaded.model.apply({"params": params}, tokens, mask=Mask.lengths(lengths))

    def run(tokens, length):
        return np.asarray(apply(loaded.params, tokens, np.array([length])))

    padded = run(tokens, 8)
    np.testing.assert_allclose(padded[:, :8], run(np.where(np.arange(11) < 8, tokens, 0), 8)[:, :8], atol=1e-6)
    assert np.abs(padded[:, :8] - run(tokens, 11)[:, :8]).max() > 1e-3
    assert abstract_params(loaded.model)["encoder"]["prefix_0"].keys() == {
        "feed_forward",
        "feed_forward_norm",
        "self_attention",
    }


@pytest.mark.parametrize(("name", "head"), [("bert", "cls.predictions."), ("roberta", "lm_head.")])
def test_the_bias_of_an_untied_head_is_written_twice(tmp_path, name, head):
    """The reference stores a second bias in addition to that of the output map, and uses it only in tied models."""
    family, values = ENTRIES[name], golden_case.golden(name)["masked_lm"]["config"] | {"tie_word_embeddings": False}
    model = MaskedLM(family.read(values, family.heads[values["architectures"][0]]))
    params = jax.tree.map(lambda leaf: jax.device_put(np.ones(leaf.shape, leaf.dtype)), abstract_params(model))
    params["output"]["bias"] = jax.device_put(np.arange(37, dtype=np.float32))
    save_pretrained(model, params, tmp_path / "ours", family=name)
    files = WeightFiles(tmp_path / "ours")
    for tensor in ("decoder.bias", "bias"):
        np.testing.assert_array_equal(files.read(head + tensor), np.arange(37.0))
    same(load_pretrained(tmp_path / "ours").params, params)
