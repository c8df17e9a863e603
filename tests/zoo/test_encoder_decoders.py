"""T5, umT5, BART, Marian, OPT and BLOOM: additional contents of published files, and errors."""

import json

import jax
import numpy as np
import pytest
from golden import case as golden_case
from golden.case import numbers

from transformer.config import ConfigError
from transformer.zoo import ENTRIES, load_pretrained, save_pretrained
from transformer.zoo.weights._files import WeightFiles, write_weights


def record_of(family, name="lm"):
    """Return the config.json and the tensors of a golden case."""
    record = golden_case.golden(family)[name]
    return record["config"], {name: numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}


def opened(directory, config, tensors, **options):
    write_weights(directory, config, tensors)
    return load_pretrained(directory, **options)


def same(loaded, expected):
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)


def test_t5_files_contain_a_repeated_and_an_unused_table(tmp_path):
    config, tensors = record_of("t5")
    plain = opened(tmp_path / "plain", config, tensors)
    table = tensors["shared.weight"]
    copies = dict.fromkeys(("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"), table)
    unread = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": numbers("unread", (8, 3))}
    # Early files, without fields that were added later.
    del config["scale_decoder_outputs"], config["tie_word_embeddings"]
    full = opened(tmp_path / "full", config, tensors | copies | unread)
    assert full.model.config == plain.model.config
    same(full, plain)

    del tensors["shared.weight"]
    same(opened(tmp_path / "alone", config, tensors | {"decoder.embed_tokens.weight": table}), plain)
    copies["encoder.embed_tokens.weight"] = table + 1
    with pytest.raises(ValueError, match=r"encoder.embed_tokens.weight.*shared.weight"):
        opened(tmp_path / "unlike", config, tensors | copies | {"shared.weight": table})


@pytest.mark.parametrize(
    ("family", "scaled"),
    [("t5", None), ("umt5", None), ("t5", False), pytest.param("t5", True, marks=pytest.mark.slow)],
)
def test_an_untied_head_is_used_regardless_of_config_json(tmp_path, family, scaled):
    """Its inputs are scaled only if config.json requests it in a separate field: files of mT5 would lose a factor."""
    config, tensors = record_of(family)
    config |= {"tie_word_embeddings": True, "scale_decoder_outputs": scaled}
    config = {name: value for name, value in config.items() if value is not None}
    own = {"lm_head.weight": numbers("own", (37, 12))}
    loaded = opened(tmp_path / "own", config, tensors | own)
    assert not loaded.model.config.embedding.tie
    np.testing.assert_array_equal(loaded.params["output"]["kernel"], own["lm_head.weight"].T)
    equal = opened(tmp_path / "equal", config, tensors | {"lm_head.weight": tensors["shared.weight"]})
    assert equal.model.config.embedding.tie
    scale = {name: 12**-0.5 if on else None for name, on in {"own": scaled, "equal": scaled is not False}.items()}
    assert (loaded.model.config.output.scale, equal.model.config.output.scale) == (scale["own"], scale["equal"])
    changes = {"embedding.tie": False, "output.scale": scale["own"]}
    assert loaded.model.config == equal.model.config.replace(**changes)


def test_an_untied_t5_does_not_scale_its_head_input():
    for name in ("t5-small", "flan-t5-small", "umt5-small"):
        family = ENTRIES["umt5" if name.startswith("u") else "t5"]
        config = family.read(family.variants[name].fields, next(iter(family.heads.values())))
        assert (config.embedding.tie, config.output.scale) == (
            (True, 512**-0.5) if name == "t5-small" else (False, None)
        )


def test_the_encoder_of_a_full_t5_can_be_read_separately(tmp_path):
    config, tensors = record_of("t5", "second")
    whole = opened(tmp_path / "whole", config, tensors)
    encoder = load_pretrained(tmp_path / "whole", architecture="T5EncoderModel")
    assert encoder.params.keys() == {"embedding", "encoder"}
    jax.tree.map(np.testing.assert_array_equal, encoder.params, {name: whole.params[name] for name in encoder.params})
    with pytest.raises(ValueError, match=r"1.*encoder.final_layer_norm.weight"):
        opened(
            tmp_path / "broken",
            config,
            {name: tensor for name, tensor in tensors.items() if name != "encoder.final_layer_norm.weight"},
            architecture="T5EncoderModel",
        )


@pytest.mark.parametrize(
    ("fields", "activation", "gated"),
    [
        ({}, "relu", False),
        ({"feed_forward_proj": "gated-gelu"}, "gelu_tanh", True),
        ({"feed_forward_proj": "gated-silu"}, "silu", True),
        ({"feed_forward_proj": "gelu"}, "gelu_erf", False),
        ({"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu", "is_gated_act": True}, "gelu_erf", True),
    ],
)
def test_both_t5_feed_forward_kinds_are_read(fields, activation, gated):
    family = ENTRIES["t5"]
    sizes = {"vocab_size": 11, "d_model": 6, "d_ff": 7, "num_layers": 1, "num_heads": 2}
    config = family.read(sizes | fields, family.heads["T5ForConditionalGeneration"])
    assert (config.feed_forward.activation, config.feed_forward.gated) == (activation, gated)
    family.write(config, "T5ForConditionalGeneration")


def test_bart_files_may_omit_prefix_and_bias(tmp_path):
    config, tensors = record_of("bart")
    full = opened(tmp_path / "full", config, tensors)
    bias = tensors.pop("final_logits_bias")
    np.testing.assert_array_equal(full.params["output_bias"], bias[0])
    short = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    more = {"encoder.version": numbers("version", (1,)), "encoder.embed_tokens.weight": short["shared.weight"]}
    former = {"normalize_before": False, "normalize_embedding": True, "num_hidden_layers": 2, "extra_pos_embeddings": 2}
    base = opened(tmp_path / "base", config | former | {"architectures": ["BartModel"]}, short | more)
    same(base, full.__class__(**vars(full) | {"params": {n: p for n, p in full.params.items() if n != "output_bias"}}))

    save_pretrained(base.model, base.params, tmp_path / "saved")
    saved = WeightFiles(tmp_path / "saved")
    assert saved.config["architectures"] == ["BartModel"]
    table = saved.read("encoder.embed_positions.weight")
    assert not table[:2].any()
    np.testing.assert_array_equal(table[2:], short["encoder.embed_positions.weight"][2:])


def test_computed_tables_in_marian_files_are_ignored(tmp_path):
    config, tensors = record_of("marian")
    plain = opened(tmp_path / "plain", config, tensors)
    more = {f"model.{stack}.embed_positions.weight": numbers(stack, (61, 12)) for stack in ("encoder", "decoder")}
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    former = {"static_position_embeddings": True, "normalize_embedding": False, "add_bias_logits": False}
    same(
        opened(
            tmp_path / "full",
            config | former,
            tensors | more | dict.fromkeys(names, tensors["model.shared.weight"]),
        ),
        plain,
    )


def test_opt_and_bloom_files_may_omit_the_prefix(tmp_path):
    for family, prefix in {"opt": "model.", "bloom": "transformer."}.items():
        config, tensors = record_of(family)
        plain = opened(tmp_path / family, config, tensors)
        if family == "bloom":  # names in the published files
            config["n_embed"], config["num_attention_heads"] = config.pop("hidden_size"), config.pop("n_head")
            config |= {"is_encoder_decoder": False, "n_inner": None, "seq_length": 2048, "skip_bias_add": True}
        short = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
        same(opened(tmp_path / f"{family}_short", config, short), plain)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "t5",
            {"feed_forward_proj": "gated-mish", "dense_act_fn": "mish"},
            r"feed_forward_proj.*'gated-mish'",
        ),
        ("t5", {"is_encoder_decoder": False}, r"is_encoder_decoder"),
        ("bart", {"encoder_ffn_dim": None}, r"encoder_ffn_dim"),
        ("bart", {"decoder_attention_heads": "4"}, r"decoder_attention_heads.*got '4'"),
        ("bart", {"encoder_attention_heads": 5}, r"stack.encoder_num_heads \(5\).*d_model"),
        ("bart", {"num_hidden_layers": 5}, r"num_hidden_layers.*5.*encoder_layers.*2"),
        ("bart", {"normalize_before": True}, r"normalize_before"),
        ("bart", {"normalize_embedding": False}, r"normalize_embedding"),
        ("bart", {"tie_word_embeddings": False}, r"tie_word_embeddings"),
        (
            "marian",
            {"decoder_vocab_size": 41},
            r"decoder_vocab_size.*41.*vocab_size.*37",
        ),
        ("marian", {"normalize_embedding": True}, r"normalize_embedding"),
        ("opt", {"_remove_final_layer_norm": True}, r"_remove_final_layer_norm"),
        ("opt", {"layer_norm_elementwise_affine": False}, r"layer_norm_elementwise_affine"),
        (
            "bloom",
            {"apply_residual_connection_post_layernorm": True},
            r"apply_residual_connection_post_layernorm",
        ),
        ("bloom", {"is_encoder_decoder": True}, r"is_encoder_decoder"),
        ("bloom", {"slow_but_exact": True}, r"slow_but_exact"),
        ("bloom", {"n_embed": 20}, r"hidden_size.*15.*n_embed.*20"),
    ],
)
def test_unsupported_settings_are_rejected_by_name(family, fields, message):
    family, config = ENTRIES[family], golden_case.golden(family)["lm"]["config"]
    head = next(iter(family.heads.values()))
    family.read(config, head)
    with pytest.raises(ConfigError, match=message):
        family.read(config | fields, head)


def test_bart_stack_sizes_are_written_and_compatible_models_saved_as_marian(tmp_path):
    config, tensors = record_of("marian")
    loaded = opened(tmp_path / "theirs", config, tensors)
    save_pretrained(loaded.model, loaded.params, tmp_path / "ours")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert written["model_type"] == "marian"
    assert (written["encoder_ffn_dim"], written["decoder_ffn_dim"], written["decoder_attention_heads"]) == (19, 19, 3)
