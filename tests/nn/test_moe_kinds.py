"""Kinds of routers and experts, compared with a NumPy loop over tokens, and their gradients with JAX's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from numeric_parts import random_params

from transformer.config import (
    Execution,
    FeedForwardOptions,
    LayerKind,
    MoE,
    NormOptions,
    StackOptions,
    TransformerConfig,
)
from transformer.generate import Beam, Draft, Sampling, beam_search, generate
from transformer.nn._blocks import LayerInputs, PreNormBlock
from transformer.nn._moe import RoutedFeedForward
from transformer.nn._router import choose, router_losses
from transformer.nn._sharding import parameter_spec
from transformer.nn.layers._layers import FeedForward
from transformer.nn.models import CausalLM

X = jax.device_put(np.random.default_rng(0).normal(size=(2, 7, 6)).astype(np.float32))
GPT_OSS = MoE(num_experts=5, top_k=2, router_bias=True)
DEEPSEEK = MoE(
    num_experts=12,
    top_k=3,
    shared_experts=1,
    scoring="sigmoid",
    e_score_correction_bias=True,
    num_groups=4,
    top_groups=2,
    routed_scaling_factor=2.5,
)
CASES = {
    "gpt-oss": (GPT_OSS, {"activation": "swiglu_clamped", "gated": True}),
    "deepseek": (DEEPSEEK, {"activation": "silu", "gated": True, "use_bias": False}),
    "not-normalized": (dataclasses.replace(DEEPSEEK, normalize_weights=False, num_groups=3), {"activation": "relu"}),
    "groups-of-softmax": (MoE(num_experts=6, top_k=2, num_groups=3, routed_scaling_factor=0.5), {"activation": "relu"}),
}


def layer(moe, **changes):
    return RoutedFeedForward(moe, **({"width": 5} | changes))


def parameters(module, x=X, scale=1.0):
    """Return random parameters, including biases."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(lambda: module.init(jax.random.key(1), x)))
    random = np.random.RandomState(2)
    return tree.unflatten(
        [jax.device_put((scale * random.standard_normal(leaf.shape)).astype(leaf.dtype)) for leaf in leaves]
    )


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(module, params, x):
    """Compute the layer in NumPy token by token: (B, T, D), and the selected experts (B, T, k), sorted."""
    moe, params = module.moe, jax.tree.map(np.float64, params["params"])
    act = {"relu": lambda x: np.maximum(x, 0), "silu": lambda x: x * sigmoid(x)}

    def feed_forward(p, x):
        up = x @ p["up"]["kernel"] + p["up"].get("bias", 0)
        if not module.gated:
            hidden = act[module.activation](up)
        else:
            gate = x @ p["gate"]["kernel"] + p["gate"].get("bias", 0)
            if module.activation == "swiglu_clamped":
                gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
                hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            else:
                hidden = act[module.activation](gate) * up
        return hidden @ p["down"]["kernel"] + p["down"].get("bias", 0)

    def one(token):
        router = params["router"]
        logits = token @ router["kernel"] + router.get("bias", 0)
        scores = sigmoid(logits) if moe.scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum()
        chooses = scores + router.get("selection_bias", 0)
        size = moe.num_experts // moe.num_groups
        together = [np.sort(chooses[g * size : (g + 1) * size])[-2:].sum() for g in range(moe.num_groups)]
        groups = range(moe.num_groups) if moe.num_groups == 1 else np.argsort(together)[-moe.top_groups :]
        among = [g * size + i for g in groups for i in range(size)]
        chosen = sorted(among, key=lambda e: -chooses[e])[: moe.top_k]
        total = scores[chosen].sum() if moe.normalize_weights else 1.0
        y = feed_forward(params["shared"], token) if moe.shared_experts else 0.0
        for e in chosen:
            expert = jax.tree.map(lambda leaf, e=e: leaf[e], params["experts"])
            y = y + moe.routed_scaling_factor * scores[e] / total * feed_forward(expert, token)
        return y, sorted(chosen)

    rows = [[one(token) for token in row] for row in np.float64(x)]
    return np.array([[y for y, _ in row] for row in rows]), np.array([[c for _, c in row] for row in rows])


@pytest.mark.parametrize("name", CASES)
def test_values_equal_a_loop_over_tokens(name):
    """Weights are large enough for gpt-oss's clamp to have an effect, and for biases to change the selection."""
    moe, changes = CASES[name]
    module = layer(moe, **changes)
    params = parameters(module, scale=2.0 if name == "gpt-oss" else 1.0)
    expected, _ = by_hand(module, params, X)
    got = jax.jit(module.apply)(params, X)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "deepseek"])
def test_gradients_equal_a_weighted_sum_over_all_experts(name):
    """JAX's gradient of a sum over all experts, unselected ones with weight 0; the selection bias gets none."""
    moe, changes = CASES[name]
    module = layer(moe, **changes)
    params = parameters(module)
    chosen = by_hand(module, params, X)[1]
    one_hot = np.eye(moe.num_experts, dtype=np.float32)[chosen].sum(2)
    dense = FeedForward(module.width, module.activation, module.gated, module.use_bias)

    def all_experts(params, x):
        params = params["params"]
        logits = x @ params["router"]["kernel"] + params["router"].get("bias", jnp.zeros(moe.num_experts))[None, None]
        scores = (jax.nn.sigmoid(logits) if moe.scoring == "sigmoid" else jax.nn.softmax(logits)) * one_hot
        weights = moe.routed_scaling_factor * scores / scores.sum(-1, keepdims=True)
        each = jax.vmap(lambda expert: dense.apply({"params": expert}, x), out_axes=2)(params["experts"])
        y = (each * weights[..., None]).sum(2)
        if moe.shared_experts:
            shared = FeedForward(moe.shared_experts * module.width, module.activation, module.gated, module.use_bias)
            y = y + shared.apply({"params": params["shared"]}, x)
        return y

    def loss(forward):
        return jax.jit(jax.grad(lambda params, x: jnp.sin(forward(params, x)).sum(), (0, 1)))

    expected = loss(all_experts)(params, X)
    found = loss(lambda params, x: module.apply(params, x)[0])(params, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, expected)
    if moe.e_score_correction_bias:
        np.testing.assert_array_equal(found[0]["params"]["router"]["selection_bias"], 0)


def test_normalized_weights_are_a_softmax_of_the_chosen_logits():
    """A softmax over all experts, normalized to sum to 1, equals gpt-oss's softmax over the selected ones."""
    logits = 5 * np.random.default_rng(0).normal(size=(11, 7)).astype(np.float32)

    @jax.jit
    def run(logits):
        best, chosen = jax.lax.top_k(logits, 3)
        of_all = jnp.take_along_axis(jax.nn.softmax(logits), chosen, axis=-1)
        return of_all / of_all.sum(-1, keepdims=True), jax.nn.softmax(best)

    np.testing.assert_allclose(*run(logits), rtol=1e-5)


def test_a_group_is_scored_by_its_two_best_experts():
    """Group 0 has the best expert, group 2 the best pair. Scores may be negative, because a selection bias may."""
    scores = np.array([[[9.0, -9.0, -9.0, 1.0, 2.0, 1.0, 5.0, 4.0, -8.0]]], np.float32) - 20
    moe = MoE(num_experts=9, top_k=3, num_groups=3, top_groups=1)
    of_groups = {1: [6, 7, 8], 2: [6, 7, 4], 3: [0, 6, 7]}

    @jax.jit
    def run(scores):
        return [choose(dataclasses.replace(moe, top_groups=groups), scores) for groups in of_groups]

    for found, expected in zip(run(scores), of_groups.values(), strict=True):
        np.testing.assert_array_equal(np.asarray(found)[0, 0], expected)


def test_the_balance_loss_of_sigmoid_routers_uses_normalized_scores():
    """n for equal experts; otherwise n E sum f p, where p is a token's scores normalized to sum to 1."""
    losses = jax.jit(lambda logits, chosen: router_losses(logits, chosen, scoring="sigmoid")[0])
    even = losses(np.zeros((1, 5, 5), np.float32), np.arange(5, dtype=np.int32)[None, :, None])
    np.testing.assert_allclose(even, [5.0], rtol=1e-6)
    logits = np.random.RandomState(0).standard_normal((1, 7, 5)).astype(np.float32)
    chosen = np.argsort(-logits)[..., :2].astype(np.int32)
    share = np.bincount(chosen.ravel(), minlength=5) / 14
    scores = sigmoid(logits[0])
    expected = 7 * 5 * (share * (scores / scores.sum(-1, keepdims=True)).mean(0)).sum()
    np.testing.assert_allclose(losses(logits, chosen), [expected], rtol=1e-5)
    # For very negative logits sigmoid(x) is exp(x), so the normalized scores are a softmax.
    low, chosen = logits - 120, jax.device_put(chosen)
    loss = jax.value_and_grad(lambda logits, scoring: router_losses(logits, chosen, scoring=scoring)[0].sum())
    found, softmaxed = jax.jit(lambda low: (loss(low, "sigmoid"), loss(low, "softmax")))(low)
    for got, expected in zip(found, softmaxed, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_a_router_has_the_expected_parameters():
    """Only requested parameters exist; the selection bias is float32, to represent small differences of scores."""
    plain = jax.eval_shape(layer(MoE(num_experts=5)).init, jax.random.key(0), X)["params"]["router"]
    assert set(plain) == {"kernel"}
    moe = dataclasses.replace(DEEPSEEK, router_bias=True)
    module = layer(moe, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    router = jax.eval_shape(module.init, jax.random.key(0), X)["params"]["router"]
    found = {name: (leaf.shape, str(leaf.dtype)) for name, leaf in router.items()}
    assert found == {
        "bias": ((12,), "bfloat16"),
        "kernel": ((6, 12), "bfloat16"),
        "selection_bias": ((12,), "float32"),
    }


def test_a_dense_feed_forward_clamps_its_activations():
    """A dense network uses the same function: one number, computed by hand."""
    params = {name: {"kernel": np.ones((1, 1), np.float32)} for name in ("gate", "up", "down")}
    module = FeedForward(1, "swiglu_clamped", True, False)
    run = jax.jit(lambda x: module.apply({"params": params}, x))
    for x, gate, up in ((9.0, 7.0, 7.0), (-9.0, -9.0, -7.0), (0.5, 0.5, 0.5)):
        got = np.asarray(run(np.full((1, 1, 1), x, np.float32)))[0, 0, 0]
        np.testing.assert_allclose(got, (up + 1) * gate * sigmoid(1.702 * gate), rtol=1e-5)


def test_experts_add_to_a_dense_layer_and_route_by_the_residual():
    """x + norm(dense(norm(x))) + norm(experts(norm(x))), as in Gemma 4."""
    moe = MoE(num_experts=5, top_k=2, d_ff=5, beside_dense=True)
    config = TransformerConfig(
        vocab_size=11,
        d_model=6,
        num_layers=1,
        num_heads=2,
        feed_forward=FeedForwardOptions(d_ff=7),
        norm=NormOptions(kind="rms_norm"),
    )
    block = PreNormBlock(config, LayerKind(self_attention=False, moe=moe))
    params = random_params(block, X, LayerInputs())["params"]
    output = jax.jit(block.apply)({"params": params}, X, LayerInputs())
    options = {
        "activation": config.feed_forward.activation,
        "gated": config.feed_forward.gated,
        "use_bias": config.parameters.use_bias,
    }

    def norm(name, x):
        scale = np.float64(params[name]["scale"])
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + config.norm.epsilon) * scale

    def applied(module, name, x, **more):
        run = jax.jit(lambda params, x, more: module.apply({"params": params}, x, **more))
        return jax.device_get(run(params[name], np.float32(x), jax.tree.map(np.float32, more)))

    x = np.float64(X)
    dense = applied(FeedForward(width=7, **options), "feed_forward", norm("feed_forward_norm", x))
    experts = RoutedFeedForward(moe, width=5, **options)
    routed, expected_aux = applied(experts, "experts_beside", norm("experts_norm", x), router_input=x)
    expected = x + norm("dense_post_norm", dense) + norm("experts_post_norm", routed)
    np.testing.assert_allclose(output.x, expected, rtol=1e-4, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), output.aux, expected_aux)


def test_router_biases_are_replicated():
    """They are replicated: they are small, and every device reads all of them."""
    sizes = {"data": 1, "fsdp": 2, "expert": 2, "context": 1, "tensor": 2}
    for name in ("bias", "selection_bias"):
        path = f"decoder/layers/slot_0/feed_forward/router/{name}"
        assert parameter_spec(path, (2, 12), sizes) == PartitionSpec(None, None)


@pytest.mark.slow
def test_generation_drops_no_token():
    """With the capacity of training, a row would depend on the tokens of a draft model and on other hypotheses."""
    tight = (LayerKind(moe=MoE(num_experts=8, top_k=2, capacity_factor=0.5)),)
    config = TransformerConfig(
        vocab_size=11,
        d_model=8,
        num_layers=2,
        num_heads=2,
        feed_forward=FeedForwardOptions(d_ff=12),
        stack=StackOptions(period=tight),
    )
    kinds = (LayerKind(moe=MoE(num_experts=8, top_k=2)),)
    model, roomy = (CausalLM(one, Execution(scan=False)) for one in (config, config.replace(**{"stack.period": kinds})))
    params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 3), int))["params"]
    params = jax.tree.map(lambda leaf: 2.5 * leaf, params)
    tokens = jnp.arange(9)[None] % 11
    training = [one.apply({"params": params}, tokens, deterministic=False) for one in (model, roomy)]
    assert not np.allclose(*training), "the capacity must have an effect in this test"
    prompts = [[1, 2, 3], list(range(11)) * 3, [4]]
    options = {"max_new_tokens": 12, "sampling": Sampling(temperature=0.0)}
    found = generate(model, params, prompts, **options)
    assert found == [generate(model, params, [prompt], **options)[0] for prompt in prompts]
    assert found == generate(roomy, params, prompts, **options)
    draft = Draft(model=model, params=params, tokens=3)
    assert generate(model, params, prompts, draft=draft, **options) == found
    beam = {"max_new_tokens": 5, "beam": Beam(size=4), "eos_id": None}
    assert beam_search(model, params, prompts=prompts, **beam) == beam_search(roomy, params, prompts=prompts, **beam)
