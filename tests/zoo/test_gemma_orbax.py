"""Orbax checkpoints of gemma: the same model as the Hugging Face export, and errors that name arrays."""

import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from golden import case as golden_case
from golden import ours

import transformer
from transformer.zoo import ENTRIES, _gemma_orbax, load_pretrained
from transformer.zoo._gemma_orbax import GemmaOrbaxFiles, is_orbax, published
from transformer.zoo.weights import _orbax

FAMILIES = ("gemma", "gemma2", "gemma3_text")
SIZES = {"layers": 2, "width": 12, "inner": 19, "heads": 6, "kv_heads": 3, "head_dim": 4, "vocabulary": 37}


def tree_of(family, *, transposed=False, **changes):
    """Return random parameters as the modules of gemma name them, with "/" in the names."""
    sizes = {**SIZES, **changes}
    width, inner, heads, kv_heads, head_dim = (sizes[n] for n in ("width", "inner", "heads", "kv_heads", "head_dim"))
    layer = {"attn/attn_vec_einsum/w": (heads, head_dim, width), "mlp/linear/w": (inner, width)}
    layer["mlp/gating_einsum/w"] = (2, inner, width) if transposed else (2, width, inner)
    layer |= {"pre_attention_norm/scale": (width,), "pre_ffw_norm/scale": (width,)}
    if heads == kv_heads:
        layer["attn/qkv_einsum/w"] = (3, heads, width, head_dim)
    else:
        layer |= {"attn/q_einsum/w": (heads, width, head_dim), "attn/kv_einsum/w": (2, kv_heads, width, head_dim)}
    if family != "gemma":
        layer |= {"post_attention_norm/scale": (width,), "post_ffw_norm/scale": (width,)}
    if family == "gemma3_text":
        layer |= {"attn/_query_norm/scale": (head_dim,), "attn/_key_norm/scale": (head_dim,)}
    shapes = {"embedder/input_embedding": (sizes["vocabulary"], width), "final_norm/scale": (width,)}
    for number in range(sizes["layers"]):
        shapes |= {f"layer_{number}/{name}": shape for name, shape in layer.items()}
    return {name: golden_case.numbers(name, shape) for name, shape in shapes.items()}


def nested(flat, depth=None):
    """Return nested dictionaries; with `depth`, only the last `depth` parts of a name are separate keys."""
    tree = {}
    for name, array in flat.items():
        parts = name.split("/")
        parts = parts if depth is None else ["/".join(parts[:-depth]), *parts[-depth:]]
        inside = tree
        for part in parts[:-1]:
            inside = inside.setdefault(part, {})
        inside[parts[-1]] = array
    return tree


def flat_layout(flat):
    """Return the published layout: a dictionary of names, and one of arrays inside."""
    return nested({f"transformer/{name}": array for name, array in flat.items()}, depth=1)


def save(directory, tree, config=None):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute(), tree)
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def config_of(family, **changes):
    names = {"width": "hidden_size", "inner": "intermediate_size", "heads": "num_attention_heads"}
    names |= {"layers": "num_hidden_layers", "vocabulary": "vocab_size", "kv_heads": "num_key_value_heads"}
    return {"model_type": family} | {names.get(name, name): size for name, size in {**SIZES, **changes}.items()}


def projections(tree, x, layer):
    """Return queries, keys, values, the attention output, and the hidden features, with the einsums of gemma."""
    attention = {name.split("/")[-2]: array for name, array in tree.items() if name.startswith(f"layer_{layer}/attn")}
    if "qkv_einsum" in attention:
        query, key, value = np.einsum("BTD,SNDH->SBTNH", x, attention["qkv_einsum"])
    else:
        query = np.einsum("BTD,NDH->BTNH", x, attention["q_einsum"])
        key, value = np.einsum("BSD,CKDH->CBSKH", x, attention["kv_einsum"])
    gating = tree[f"layer_{layer}/mlp/gating_einsum/w"]
    letters = "...F,NHF->...NH" if gating.shape[2] == x.shape[2] else "...F,NFH->...NH"
    hidden = np.einsum(letters, x, gating)
    linear = tree[f"layer_{layer}/mlp/linear/w"]
    return {
        "self_attention/query": query,
        "self_attention/key": key,
        "self_attention/value": value,
        "self_attention/out": np.einsum("BTNH,NHD->BTD", query, attention["attn_vec_einsum"]),
        "feed_forward/gate": hidden[..., 0, :],
        "feed_forward/up": hidden[..., 1, :],
        "feed_forward/down": np.einsum("...H,HF->...F", hidden[..., 0, :], linear),
    }


@pytest.mark.parametrize("layout", ["flat", "nested", "training"])
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma", {"kv_heads": 6}),
        ("gemma", {"kv_heads": 1}),
        ("gemma2", {}),
        ("gemma2", {"transposed": True, "layers": 3}),
        ("gemma3_text", {"transposed": True}),
    ],
)
def test_every_kernel_equals_the_einsum_of_gemma(tmp_path, family, changes, layout):
    tree = tree_of(family, **changes)
    sizes = {name: size for name, size in changes.items() if name != "transposed"}
    stored = flat_layout(tree)
    if layout != "flat":
        stored = nested({name.removesuffix("/w") if "/mlp/" in name else name: array for name, array in tree.items()})
    if layout == "training":
        stored = {
            "params": stored,
            "step": np.asarray(3),
            "opt_state": {"mu": np.ones(2)},
            "collections": {"a": np.ones(1)},
        }
    directory = tmp_path / "checkpoint"
    save(directory / "default" if layout == "training" else directory, stored)
    (directory / "config.json").write_text(json.dumps(config_of(family, **sizes)))
    loaded = load_pretrained(directory)
    assert loaded.family.name == family
    params, x = loaded.params, np.random.RandomState(0).standard_normal((2, 3, SIZES["width"])).astype(np.float32)
    np.testing.assert_array_equal(params["embedding"]["embedding"], tree["embedder/input_embedding"])
    np.testing.assert_array_equal(params["decoder"]["final_norm"]["scale"], tree["final_norm/scale"])
    for number, layer in enumerate(loaded.model.config.layers()):
        own = params["decoder"]
        for name in layer.path.split("/"):
            own = own[name]
        own = own if layer.index is None else jax.tree.map(lambda leaf, layer=layer: np.asarray(leaf)[layer.index], own)
        expected = projections(tree, x, number)
        for name, value in expected.items():
            module, part = name.split("/")
            inputs = {"out": expected["self_attention/query"], "down": expected["feed_forward/gate"]}.get(part, x)
            axes = 2 if part == "out" else 1
            got = np.tensordot(inputs, np.asarray(own[module][part]["kernel"]), axes)
            np.testing.assert_allclose(got, value, atol=1e-5, err_msg=name)
        norms = {"attention_norm": "pre_attention_norm", "feed_forward_norm": "pre_ffw_norm"}
        if family != "gemma":
            norms |= {"attention_post_norm": "post_attention_norm", "feed_forward_post_norm": "post_ffw_norm"}
        for mine, theirs in norms.items():
            np.testing.assert_array_equal(own[mine]["scale"], tree[f"layer_{number}/{theirs}/scale"])
        if family == "gemma3_text":
            for mine, theirs in {"query_norm": "_query_norm", "key_norm": "_key_norm"}.items():
                scale = own["self_attention"][mine]["scale"]
                np.testing.assert_array_equal(scale, tree[f"layer_{number}/attn/{theirs}/scale"])


def from_export(tensors, fields):
    """Convert the tensors of a Hugging Face export to the parameters of gemma."""
    heads, head_dim = fields["num_attention_heads"], fields["head_dim"]
    kv_heads = fields["num_key_value_heads"]
    tree = {"embedder/input_embedding": tensors["model.embed_tokens.weight"]}
    tree["final_norm/scale"] = tensors["model.norm.weight"]
    four = "model.layers.0.pre_feedforward_layernorm.weight" in tensors
    norms = {"input_layernorm": "pre_attention_norm", "post_attention_layernorm": "pre_ffw_norm"}
    if four:
        norms |= {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "pre_ffw_norm"}
        norms |= {"post_feedforward_layernorm": "post_ffw_norm"}
    norms |= {"self_attn.q_norm": "attn/_query_norm", "self_attn.k_norm": "attn/_key_norm"}
    for number in range(fields["num_hidden_layers"]):
        theirs, ours_ = f"model.layers.{number}.", f"layer_{number}/"
        for name, own in norms.items():
            if f"{theirs}{name}.weight" in tensors:
                tree[f"{ours_}{own}/scale"] = tensors[f"{theirs}{name}.weight"]
        query, key, value = (
            tensors[f"{theirs}self_attn.{name}_proj.weight"].reshape(count, head_dim, -1).swapaxes(1, 2)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if heads == kv_heads:
            tree[f"{ours_}attn/qkv_einsum/w"] = np.stack([query, key, value])
        else:
            tree[f"{ours_}attn/q_einsum/w"], tree[f"{ours_}attn/kv_einsum/w"] = query, np.stack([key, value])
        out = tensors[f"{theirs}self_attn.o_proj.weight"]
        tree[f"{ours_}attn/attn_vec_einsum/w"] = out.T.reshape(heads, head_dim, -1)
        gate, up, down = (tensors[f"{theirs}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        tree[f"{ours_}mlp/gating_einsum/w"], tree[f"{ours_}mlp/linear/w"] = np.stack([gate, up]), down.T
    return tree


@pytest.mark.parametrize("family", FAMILIES)
def test_the_checkpoint_equals_the_transformers_export(tmp_path, family):
    """The logits are those of the reference for the same weights, which the golden files hold."""
    record = golden_case.golden(family)["lm"]
    tensors = {name: golden_case.numbers(name, tuple(shape)) for name, shape in record["tensors"].items()}
    fields = record["config"]
    save(tmp_path / "orbax", flat_layout(from_export(tensors, fields)), fields)
    loaded = load_pretrained(tmp_path / "orbax")
    export = load_pretrained(ours.write(tmp_path / "export", record))
    assert loaded.model.config == export.model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, export.params)
    case = golden_case.cases(family)["lm"]
    ours.compare(ours.run(loaded.model, loaded.params, case, "none"), record["results"], "none", case)


def test_gemma_1_needs_no_config(tmp_path):
    """The shapes say everything; the command line and `transformer.load` take the directory."""
    from transformer.__main__ import main

    directory = save(tmp_path / "gemma", flat_layout(tree_of("gemma", kv_heads=6)))
    model, params = transformer.load(directory)
    config = model.config
    assert (config.vocab_size, config.d_model, config.feed_forward.d_ff) == (37, 12, 19)
    assert (config.num_layers, config.num_heads, config.kv_heads, config.size_of_head) == (2, 6, 6, 4)
    assert main(["convert", str(directory), str(tmp_path / "out")]) == 0
    again, same = transformer.load(tmp_path / "out")
    assert again.config == config
    jax.tree.map(np.testing.assert_array_equal, same, params)


def test_unused_rows_of_the_vocabulary_are_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(_gemma_orbax, "_PADDED_VOCABULARY", 37)
    monkeypatch.setattr(_gemma_orbax, "_VOCABULARY", 31)
    tree = tree_of("gemma")
    loaded = load_pretrained(save(tmp_path / "gemma", flat_layout(tree)))
    assert loaded.model.config.vocab_size == 31
    np.testing.assert_array_equal(loaded.params["embedding"]["embedding"], tree["embedder/input_embedding"][:31])


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_remaining_settings_follow_from_published_sizes(tmp_path, monkeypatch, family):
    named = {"hidden_size": 12, "num_hidden_layers": 2, "intermediate_size": 19, "sliding_window": 5}
    named |= {"query_pre_attn_scalar": 49}
    monkeypatch.setattr(_gemma_orbax, "published", lambda family: [named | {"hidden_size": 13}, named])
    config = load_pretrained(save(tmp_path / "tiny", flat_layout(tree_of(family)))).model.config
    assert config.attention.scale == 1 / 7
    assert config.kinds[0].window == 5
    monkeypatch.setattr(_gemma_orbax, "published", lambda family: [])
    with pytest.raises(ValueError, match=rf"(?s)no published model of the family {family} .*size 12.*Add a config"):
        load_pretrained(tmp_path / "tiny")


def test_every_published_model_has_distinct_sizes():
    names = ("hidden_size", "num_hidden_layers", "intermediate_size")
    for family, count in (("gemma2", 3), ("gemma3_text", 5)):
        variants = published(family)
        assert len({tuple(one[name] for name in names) for one in variants}) == len(variants) == count
        head = next(iter(ENTRIES[family].heads.values()))
        for fields in variants:
            whole = {"vocab_size": 9, "num_attention_heads": 8, "num_key_value_heads": 4} | fields
            assert ENTRIES[family].read(whole, head).d_model == fields["hidden_size"]


def test_images_are_not_read(tmp_path):
    tree = flat_layout(tree_of("gemma3_text"))
    tree["transformer/embedder"] |= {"mm_input_projection": {"w": np.ones((3, 12), np.float32)}}
    tree["SigLiPFromPatches_0/siglip_encoder/embedding"] = {"kernel": np.ones((2, 2), np.float32)}
    loaded = load_pretrained(save(tmp_path / "images", tree, config_of("gemma3_text")))
    assert loaded.family.name == "gemma3_text"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_1/attn/q_einsum/w": None}, r"layer_1/attn/q_einsum/w"),
        ({"layer_0/mlp/linear/w": None}, r"layer_0/mlp/linear"),
        ({"layer_1/attn/lora/a": np.ones((2, 2))}, r"layer_1/attn/lora/a"),
        ({"layer_3/pre_ffw_norm/scale": np.ones(12)}, r"layer_2/pre_attention_norm/scale"),
        ({"final_norm/scale": np.ones(13)}, r"final_norm/scale.*\(12,\).*got \(13,\)"),
        ({"layer_1/post_ffw_norm/scale": None}, r"layer_1/post_ffw_norm/scale"),
        ({"stacked_layers/attn/w": np.ones(3)}, "its layers are stacked, which is not supported"),
        ({"layer_0/mlp/linear/w": np.ones((12, 12))}, r"mlp/linear.*\(12\)"),
        ({"layer_0/attn/kv_einsum/w": np.ones((2, 3))}, r"kv_einsum/w.*4.*\(2.*3\)"),
    ],
)
def test_arrays_that_do_not_fit_are_listed(tmp_path, change, message):
    tree = {name: array for name, array in (tree_of("gemma2") | change).items() if array is not None}
    with pytest.raises(ValueError, match=message):
        load_pretrained(save(tmp_path / "wrong", flat_layout(tree), config_of("gemma2")))


def test_a_damaged_checkpoint_is_an_error(tmp_path):
    directory = tmp_path / "gemma"
    with ocp.PyTreeCheckpointer(use_ocdbt=False) as checkpointer:  # one directory for each array
        checkpointer.save(directory.absolute(), flat_layout(tree_of("gemma")))
    broken = shutil.copytree(directory, tmp_path / "broken")
    assert load_pretrained(directory).family.name == "gemma"
    (broken / "_METADATA").write_text("{")
    with pytest.raises(ValueError, match="broken is not a valid Orbax checkpoint: its metadata can't be read"):
        load_pretrained(broken)
    (directory / "transformer/layer_1/mlp/linear.w/0.0").write_bytes(b"no chunk")
    with pytest.raises(ValueError, match=r"gemma.*: transformer/layer_1/mlp/linear/w"):
        load_pretrained(directory)


def test_rejects_links_outside_the_directory(tmp_path):
    directory = save(tmp_path / "gemma", flat_layout(tree_of("gemma")))
    (tmp_path / "secret").write_text("secret")
    (directory / "d" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"gemma is not a valid Orbax checkpoint: .*link"):
        load_pretrained(directory)


def test_rejects_arrays_larger_than_their_files(tmp_path, monkeypatch):
    directory = save(tmp_path / "gemma", flat_layout(tree_of("gemma")))
    monkeypatch.setattr(_orbax, "MAX_RATIO", 0.01)
    with pytest.raises(ValueError, match=r"its arrays take [\d,]+ bytes, but its files only [\d,]+"):
        load_pretrained(directory)


def test_only_orbax_checkpoints_are_recognized(tmp_path):
    assert not is_orbax(tmp_path)
    directory = save(tmp_path / "gemma", flat_layout(tree_of("gemma")))
    assert is_orbax(directory)
    (directory / "model.safetensors").touch()
    assert not is_orbax(directory)
    with pytest.raises(FileNotFoundError, match="_METADATA"):
        GemmaOrbaxFiles(tmp_path)
