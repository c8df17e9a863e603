"""LoRA adapters in the format of PEFT: written and read again, refused, switched, and compared with PEFT itself."""

import json

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from transformer.config import ConfigError
from transformer.inference import open_model
from transformer.nn.quantization._adapted import Adapted
from transformer.training import lora
from transformer.training.lora import LoRA
from transformer.zoo import ENTRIES, abstract_params, save_pretrained
from transformer.zoo._adapters import adapter_for, save_adapter
from transformer.zoo.weights._adapters import Adapter
from transformer.zoo.weights._files import WeightsError

SIZES = {
    "vocab_size": 37,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "max_position_embeddings": 32,
}
FAMILIES = {
    "llama": SIZES | {"num_key_value_heads": 1},
    "gemma3_text": SIZES | {"head_dim": 6, "num_key_value_heads": 1, "query_pre_attn_scalar": 6},
    "qwen2": SIZES,
    "phi3": SIZES | {"num_key_value_heads": 1},
    "gpt_neox": {name: size for name, size in SIZES.items() if name != "num_key_value_heads"} | {"rotary_pct": 0.5},
    "gpt2": {"vocab_size": 37, "n_embd": 12, "n_layer": 2, "n_head": 3, "n_positions": 32},
}
ALL = ("query", "key", "value", "out", "up", "down")
TOKENS = np.random.default_rng(9).integers(0, 37, (2, 7))


def tiny(family, seed=0):
    """A tiny model of a family with random parameters."""
    entry = ENTRIES[family]
    head = next(iter(entry.heads.values()))
    model = head.model(entry.read(FAMILIES[family] | {"model_type": family}, head))
    random = np.random.default_rng(seed)
    return model, jax.tree.map(
        lambda leaf: jax.device_put(random.normal(0, 0.3, leaf.shape).astype(np.float32)), abstract_params(model)
    )


def updated(params, config, seed=1):
    """An adapter with random updates of these parameters."""
    random = np.random.default_rng(seed)

    @jax.jit
    def plain():
        return lora.init(jax.random.key(seed), lora.flatten_adapted(params), config)

    updates = jax.tree.map(
        lambda leaf: jax.device_put(np.asarray(leaf) + random.normal(0, 0.2, leaf.shape).astype(np.float32)), plain()
    )
    layers = {}
    for path, leaf in flatten_dict(updates).items():
        layers.setdefault("/".join(path[:-1]), {})[path[-1]] = leaf
    return updates, Adapter(updates=layers, rank=config.rank, alpha=config.alpha, rslora=config.rslora)


def logits(model, params):
    return np.asarray(jax.jit(lambda params, tokens: model.apply({"params": params}, tokens))(params, TOKENS))


def differs(got, from_):
    return np.abs(np.asarray(got) - np.asarray(from_)).max() > 1e-2


@pytest.mark.parametrize(
    ("family", "targets", "dora"),
    [
        pytest.param("phi3", ("query", "up"), True, marks=pytest.mark.slow),
        pytest.param("llama", ALL, False, marks=pytest.mark.slow),
        pytest.param("gpt_neox", ("value", "out"), True, marks=pytest.mark.slow),
        pytest.param("gpt2", ALL, True, marks=pytest.mark.slow),
    ],
)
def test_a_saved_adapter_computes_the_same_when_loaded(family, targets, dora, tmp_path):
    model, params = tiny(family)
    config = LoRA(rank=2, alpha=3.0, targets=targets, dora=dora, rslora=family == "phi3")
    params = lora.quantize_base(params, "nf4" if family == "phi3" else None)
    updates, adapter = updated(params, config)
    save_adapter(model, adapter, params, tmp_path / "adapter", family, "base")
    got = adapter_for(model, params, tmp_path / "adapter", *entry(family)).applied_to(params)
    expected = flatten_dict(jax.jit(lambda: lora.merge(params, updates, config))())
    for path, leaf in flatten_dict(jax.jit(lora.flatten_adapted)(got)).items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-4, atol=1e-5, err_msg="/".join(path))


def entry(family):
    return ENTRIES[family], next(iter(ENTRIES[family].heads))


def written(tmp_path):
    model, params = tiny("llama")
    _, adapter = updated(params, LoRA(rank=2))
    save_adapter(model, adapter, params, tmp_path, "llama", "some/base")
    return model, params


def test_names_and_shapes_equal_peft(tmp_path):
    written(tmp_path / "adapter")
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.{}_proj.lora_{}.weight"
    assert tensors[name.format("q", "A")].shape == (2, 12)
    assert tensors[name.format("v", "B")].shape == (4, 2)
    assert len(tensors) == 2 * 2 * 2
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (2, 16.0, "some/base")
    assert "model.layers.0.self_attn.q_proj" in config["target_modules"]


def test_an_adapter_for_a_different_model_lists_modules_and_sizes(tmp_path):
    written(tmp_path / "adapter")
    model, params = tiny("qwen2")
    with pytest.raises(ConfigError, match="does not fit this Qwen 2") as raised:
        adapter_for(model, params, tmp_path / "adapter", *entry("qwen2"))
    assert "layers.0.self_attn.v_proj: expected lora_B (12, 2), got (4, 2)" in str(raised.value)
    assert "some/base" in str(raised.value)
    model, params = tiny("gpt2")
    with pytest.raises(ConfigError, match=r"q_proj.*GPT-2"):
        adapter_for(model, params, tmp_path / "adapter", *entry("gpt2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type.*'LORA'.*got 'IA3'.*PEFT"),
        ({"r": 0}, "r in .* must be a number of at least 1, got 0"),
        ({"bias": "all"}, r"bias.*PEFT"),
        ({"target_parameters": ["experts"]}, "sets target_parameters"),
        ({"rank_pattern": {"q_proj": 3}}, r"q_proj.*lora_A \(3.*12\).*got \(2.*12\)"),
        ({"rank_pattern": {"q_proj": "2"}}, r"rank_pattern.*got .*'2'"),
        ({"alpha_pattern": {"q_proj": None}}, r"alpha_pattern"),
        (
            {"rank_pattern": {"a{99999999999999999999}": 2}},
            r"rank_pattern.*'a{9+}'",
        ),
        ({"alpha_pattern": {"(" * 5000: 2}}, r"alpha_pattern"),
        ({"use_dora": True}, r"use_dora"),
        ({"init_lora_weights": "pissa_niter_4"}, r"init_lora_weights.*'pissa_niter_4'.*base model.*PEFT"),
        ({"init_lora_weights": "olora"}, r"init_lora_weights.*'olora'"),
    ],
)
def test_options_that_would_change_the_function_are_refused(changes, message, tmp_path):
    model, params = written(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises((ConfigError, WeightsError), match=message):
        adapter_for(model, params, tmp_path / "adapter", *entry("llama"))


def test_an_unknown_family_is_refused(tmp_path):
    model, params = tiny("llama")
    _, adapter = updated(params, LoRA(rank=2))
    with pytest.raises(ConfigError, match=r"'lama'.*'llama'\?"):
        save_adapter(model, adapter, params, tmp_path / "adapter", "lama")


def test_a_loaded_adapter_is_saved_with_its_scales(tmp_path):
    model, params = written(tmp_path / "first")
    file = tmp_path / "first" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"alpha_pattern": {"q_proj": 3}}))
    first = adapter_for(model, params, tmp_path / "first", *entry("llama"))
    assert first.scale == 1.0  # modules with several factors: they are part of the updates
    save_adapter(model, first, params, tmp_path / "second", "llama")
    second = adapter_for(model, params, tmp_path / "second", *entry("llama"))

    @jax.jit
    def flat(params):
        return [lora.flatten_adapted(one.applied_to(params)) for one in (second, first)]

    found, expected = map(flatten_dict, flat(params))
    for path, leaf in found.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-5, atol=1e-6, err_msg="/".join(path))


@pytest.mark.parametrize(
    ("changes", "scale"),
    [({}, 3 / 4), ({"use_rslora": True}, 3 / 2), ({"lora_alpha": 7}, 7 / 4), ({"use_rslora": None}, 3 / 4)],
)
def test_the_scale_of_an_adapter_follows_its_settings(changes, scale, tmp_path):
    """The factor is alpha / r, or alpha / sqrt(r) (Kalajdzievski 2023, arXiv 2312.03732), with rank 4."""
    model, params = tiny("llama")
    _, adapter = updated(params, LoRA(rank=4, alpha=3.0, targets=("query",)))
    save_adapter(model, adapter, params, tmp_path / "adapter", "llama", "base")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    found = adapter_for(model, params, tmp_path / "adapter", *entry("llama"))
    kernels = [leaf for leaf in jax.tree.leaves(found.applied_to(params), is_leaf=is_adapted) if is_adapted(leaf)]
    assert {kernel.scale for kernel in kernels} == {scale}
    save_adapter(model, found, params, tmp_path / "again", "llama")
    again = json.loads((tmp_path / "again" / "adapter_config.json").read_text())
    fields = ("r", "lora_alpha", "use_rslora")
    assert [again[name] for name in fields] == [4, changes.get("lora_alpha", 3.0), bool(changes.get("use_rslora"))]


def is_adapted(leaf):
    return isinstance(leaf, Adapted)


def test_a_parameter_of_one_of_several_stacked_layers_is_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    model, params = written(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    name = "model.layers.0.input_layernorm.weight"
    save_file(load_file(file) | {f"base_model.model.{name}": np.ones(12, np.float32)}, file)
    with pytest.raises(ConfigError, match=f"{name}"):
        adapter_for(model, params, tmp_path / "adapter", *entry("llama"))


def test_rejects_a_full_parameter_of_a_different_size(tmp_path):
    """`modules_to_save` of PEFT: a parameter that the adapter replaces."""
    from safetensors.numpy import load_file, save_file

    model, params = written(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.norm.weight": np.ones(13, np.float32)}, file)
    with pytest.raises(ConfigError, match=r"model\.norm\.weight.*\(12,\).*\(13,\)"):
        adapter_for(model, params, tmp_path / "adapter", *entry("llama"))


@pytest.mark.parametrize("tensors", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")], ids=len)
def test_tied_embeddings_and_head_are_saved_and_replaced_together(tensors, tmp_path):
    """PEFT trains tied modules apart; the model has one parameter for both, which only equal tensors can replace."""
    from safetensors.numpy import load_file, save_file

    model, params = tiny("gemma3_text")
    names = {"embed_tokens": "base_model.model.model.embed_tokens.weight", "lm_head": "base_model.model.lm_head.weight"}
    table = np.random.default_rng(3).normal(size=(37, 12)).astype(np.float32)
    a, b = np.ones((1, 12), np.float32), np.ones((18, 1), np.float32)
    place = "decoder/layers/slot_0/self_attention/query"
    path = next(path for path in flatten_dict(params, sep="/") if path.startswith("embed"))
    update = {"a": np.stack([a.T, a.T]), "b": np.stack([b.T, b.T])}
    adapter = Adapter(updates={place: update}, rank=1, alpha=1.0, new={path: table})
    save_adapter(model, adapter, params, tmp_path / "adapter", "gemma3_text")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    stored = load_file(file)
    for name in names.values():
        np.testing.assert_array_equal(stored[name], table)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    read = adapter_for(model, params, tmp_path / "adapter", *entry("gemma3_text"))
    np.testing.assert_array_equal(read.new[path], table)

    others = {name: array for name, array in stored.items() if name not in names.values()}
    save_file(others | {names[tensor]: table + (tensor == "lm_head") for tensor in tensors}, file)
    with pytest.raises(ConfigError, match=r"(embed_tokens|lm_head).weight: trained (without|apart from)"):
        adapter_for(model, params, tmp_path / "adapter", *entry("gemma3_text"))


def test_experts_have_no_module_in_the_transformers_library(tmp_path):
    family = ENTRIES["mixtral"]
    head = next(iter(family.heads.values()))
    fields = SIZES | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
    model = head.model(family.read(fields, head))
    params = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), abstract_params(model))
    _, adapter = updated(params, LoRA(rank=2, targets=("up", "query")))
    with pytest.raises(ConfigError, match=r"decoder/.*experts/up"):
        save_adapter(model, adapter, params, tmp_path / "adapter", "mixtral")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.programs(23, reason="`merged` and `add_adapter` compute each parameter outside of jax.jit")
def test_several_adapters_share_one_base_and_switch_without_reloading(tmp_path):
    model, params = tiny("llama")
    save_pretrained(model, params, tmp_path / "base", family="llama")
    for seed, name in enumerate(("first", "second")):
        _, adapter = updated(params, LoRA(rank=2), seed=seed)
        save_adapter(model, adapter, params, tmp_path / name, "llama")
    opened = open_model(tmp_path / "base").add_adapter(tmp_path / "first").add_adapter(tmp_path / "second", "two")
    first, two = opened.with_adapter("first"), opened.with_adapter("two")
    place = ("decoder", "layers", "slot_0", "self_attention", "query", "kernel")
    kernels = [flatten_dict(one.merged().params)[place] for one in (opened, first, two)]
    assert differs(kernels[0], kernels[1])
    assert differs(kernels[1], kernels[2])
    np.testing.assert_array_equal(flatten_dict(two.with_adapter("first").merged().params)[place], kernels[1])
    assert flatten_dict(two.params)[place].kernel is flatten_dict(opened.params)[place]
    assert two.with_adapter(None).params is opened.params
    np.testing.assert_allclose(
        logits(first.model, first.params), logits(first.model, first.merged().params), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(ConfigError, match="'third'"):
        opened.with_adapter("third")


# Compared with PEFT


@pytest.fixture
def peft():
    pytest.importorskip("torch")
    return pytest.importorskip("peft")


def theirs(directory):
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    model = getattr(transformers, config.architectures[0]).from_pretrained(directory, dtype=torch.float32)
    return model.eval()


def run(model):
    import torch

    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


OPTIONS = [
    {"targets": ALL, "alpha": 5.0},
    {"targets": ("query", "value"), "alpha": 3.0, "rslora": True},
    {"targets": ("value", "down"), "alpha": 2.0, "dora": True},
]


@pytest.mark.parity
@pytest.mark.parametrize("options", OPTIONS, ids=("all", "rslora", "dora"))
@pytest.mark.parametrize("family", FAMILIES)
def test_peft_computes_the_same_with_our_adapter(family, options, peft, tmp_path):
    model, params = tiny(family)
    config = LoRA(rank=2, **options)
    updates, adapter = updated(params, config)
    save_pretrained(model, params, tmp_path / "base", family=family, fields={"pad_token_id": 0})
    save_adapter(model, adapter, params, tmp_path / "adapter", family)
    base = theirs(tmp_path / "base")
    plain = run(base)
    adapted = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    got, expected = run(adapted), logits(model, lora.adapt(params, updates, config))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert differs(got, plain)


NAMES = {
    "llama": (["q_proj", "v_proj", "o_proj", "down_proj"], ["k_proj", "up_proj"]),
    "gemma3_text": (["q_proj", "o_proj"], ["gate_proj"]),
    "qwen2": (["k_proj", "up_proj"], ["q_proj"]),
    "phi3": (["qkv_proj", "down_proj"], ["gate_up_proj"]),
    "gpt_neox": (["query_key_value", "dense_h_to_4h"], ["dense"]),
    "gpt2": (["c_attn", "c_fc"], ["c_proj"]),
}


@pytest.mark.parity
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_peft_adapter_computes_the_same_here(family, number, peft, tmp_path):
    import torch

    model, params = tiny(family)
    save_pretrained(model, params, tmp_path / "base", family=family, fields={"pad_token_id": 0})
    base = theirs(tmp_path / "base")
    plain = run(base)
    first, second = NAMES[family]
    options = (
        {"target_modules": first, "lora_alpha": 6, "rank_pattern": {first[-1]: 2}, "alpha_pattern": {first[0]: 5}},
        {"target_modules": first, "lora_alpha": 2, "use_rslora": True, "layers_to_transform": [1]},
        {"target_modules": first + second, "lora_alpha": 3, "use_dora": True, "layers_to_transform": [0]},
    )[number]
    torch.manual_seed(0)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=3, fan_in_fan_out=family == "gpt2", **options)).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    adapted.save_pretrained(tmp_path / "adapter")
    ours = open_model(tmp_path / "base").add_adapter(tmp_path / "adapter").with_adapter("adapter")
    got, expected = logits(ours.model, ours.params), run(adapted)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)
    assert differs(got, plain)
