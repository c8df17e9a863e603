"""Mixture of experts: compared with a loop over tokens; work grows only with top_k; rows are independent."""

import functools
import itertools
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxprs import jaxprs_in_params
from numeric_parts import random_params
from training_recipes import VOCABULARY, batch_outputs, change, compiled_step, start, tiny_batch, tiny_recipe

from transformer.config import Execution, LayerKind, MoE, RotaryOptions, StackOptions, TransformerConfig
from transformer.nn._masks import Mask
from transformer.nn._moe import RoutedFeedForward, grouped_linear
from transformer.nn._router import router_losses, within_capacity
from transformer.nn._stacks import Decoder
from transformer.nn.layers._layers import ACTIVATIONS
from transformer.nn.models import CausalLM, Classifier, Seq2Seq
from transformer.training import _recipe as recipes
from transformer.training._step import make_eval_step, training_loss
from transformer.training.tasks._losses import cross_entropy

FIVE = MoE(num_experts=5, top_k=2, load_balance_weight=1.0, router_z_weight=1.0)
losses = jax.jit(router_losses)


def best(logits):
    """Return the two experts with the largest logits."""
    return np.argsort(-logits, axis=-1)[..., :2].astype(np.int32)


def normal(seed, *shape):
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


X = normal(0, 3, 11, 6)
LONG = normal(0, 1, 83, 6)  # blocks of several rows


def layer(moe=FIVE, **changes):
    return RoutedFeedForward(moe, **({"width": 7, "activation": "silu"} | changes))


def parameters(module, x=X, seed=1):
    """Return random parameters: biases differ, and experts are selected with different frequency."""
    return random_params(module, x, seed=seed)


def by_token(module, params, x, kept=None):
    """Compute the documented formula token by token; `kept` (B, T, k) is False where an expert is full."""
    moe, params = module.moe, params["params"]

    def feed_forward(p, x):
        def project(name, x):
            return x @ p[name]["kernel"] + p[name].get("bias", 0.0)

        activate = ACTIVATIONS[module.activation]
        hidden = project("up", x)
        return project("down", activate(project("gate", x)) * hidden if module.gated else activate(hidden))

    def one(token, kept):
        probabilities = jax.nn.softmax(token @ params["router"]["kernel"])
        chosen = jnp.argsort(-probabilities)[: moe.top_k]
        total = probabilities[chosen].sum() if moe.normalize_weights else 1.0
        y = feed_forward(params["shared"], token) if moe.shared_experts else 0.0
        for e, there in zip(chosen, kept, strict=True):
            expert = jax.tree.map(lambda leaf, e=e: leaf[e], params["experts"])
            y = y + there * probabilities[e] / total * feed_forward(expert, token)
        return y

    kept = np.ones((*x.shape[:2], moe.top_k), np.float32) if kept is None else kept
    return jax.jit(jax.vmap(jax.vmap(one)))(x, kept)


CASES = [
    (FIVE, {}),
    (FIVE, {"gated": True, "use_bias": False}),
    (MoE(num_experts=5, top_k=1, normalize_weights=False, shared_experts=2), {"gated": True}),
    (MoE(num_experts=3, top_k=3), {"activation": "gelu_erf"}),
]


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("moe", "changes"), CASES)
def test_equals_a_loop_over_tokens(moe, changes):
    """Outputs and gradients with respect to parameters and tokens: no token is dropped, for any load."""
    module, x = layer(moe, **changes), LONG
    params = parameters(module, x)
    slope = np.cos(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    def run(forward):
        return jax.value_and_grad(lambda params, x: ((y := forward(params, x)) * slope).sum() + (y**2).sum(), (0, 1))

    expected = jax.jit(run(functools.partial(by_token, module)))(params, x)
    found = jax.jit(run(lambda params, x: module.apply(params, x)[0]))(params, x)
    chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-5)


def test_all_tokens_may_choose_one_expert():
    """The most uneven load: every block belongs to one expert, and nothing is dropped."""
    module = layer(MoE(num_experts=5, top_k=1, normalize_weights=False))
    x = jax.device_put(np.abs(LONG) + np.float32(0.1))
    params = parameters(module)
    params["params"]["router"]["kernel"] = np.zeros((6, 5), np.float32)
    params["params"]["router"]["kernel"][:, 3] = 9.0
    expected = by_token(module, params, x)
    np.testing.assert_allclose(jax.jit(module.apply)(params, x)[0], expected, rtol=1e-4, atol=1e-5)


def test_parameters_and_their_first_values():
    """Each expert is initialized like a separate dense layer."""
    module = layer(MoE(num_experts=5, shared_experts=2), width=400, gated=True)
    params = jax.jit(module.init)(jax.random.key(0), X)["params"]
    shapes = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape for path, leaf in _leaves(params)}
    assert shapes == {
        "experts/down/bias": (5, 6),
        "experts/down/kernel": (5, 400, 6),
        "experts/gate/bias": (5, 400),
        "experts/gate/kernel": (5, 6, 400),
        "experts/up/bias": (5, 400),
        "experts/up/kernel": (5, 6, 400),
        "router/kernel": (6, 5),
        "shared/down/bias": (6,),
        "shared/down/kernel": (800, 6),
        "shared/gate/bias": (800,),
        "shared/gate/kernel": (6, 800),
        "shared/up/bias": (800,),
        "shared/up/kernel": (6, 800),
    }
    kernel = np.asarray(params["experts"]["up"]["kernel"])
    np.testing.assert_allclose(kernel.std((1, 2)), np.full(5, math.sqrt(6 / 406 / 3)), rtol=0.1)
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1


def _leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def dot_flops(jaxpr, used):
    """Count FLOPs of all matrix multiplications; those in the loop over blocks count `used` times."""
    total = 0
    for equation in jaxpr.eqns:
        times = used if equation.primitive.name == "while" else equation.params.get("length", 1)
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            total += 2 * inner * equation.outvars[0].aval.size
        for inner in jaxprs_in_params(equation.params):
            total += times * dot_flops(inner, used)
    return total


@pytest.mark.parametrize("top_k", [1, 2])
def test_work_grows_with_top_k_and_not_with_the_number_of_experts(top_k):
    """Count FLOPs of the compiled forward and backward pass: largest number of used blocks times FLOPs of one block.

    Compare them with a dense layer of the same width and number of tokens (`ideal`).
    """
    x = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)
    copies, width, ideal = 4 * 64 * top_k, 128, 3 * 2 * 2 * 4 * 64 * top_k * 16 * 128
    found = {}
    for experts in (4, 16):
        module = layer(MoE(num_experts=experts, top_k=top_k, normalize_weights=False), width=width)
        params = jax.eval_shape(module.init, jax.random.key(0), x)
        gradient = jax.grad(lambda p, x, module=module: module.apply(p, x)[0].sum(), (0, 1))
        rows = copies // (8 * experts)
        blocks = (copies + experts * (rows - 1)) // rows
        found[experts] = dot_flops(jax.make_jaxpr(gradient)(params, x).jaxpr, blocks)
        assert ideal < found[experts] < 1.3 * ideal
        # The compiler counts the body of a loop once. Check that it did not enlarge the body.
        compiled = jax.jit(gradient).lower(params, x).compile().cost_analysis()["flops"]
        assert compiled < 0.5 * ideal
    assert 0.8 < found[16] / found[4] < 1.2


def test_unused_blocks_give_zeros_and_no_gradient():
    @jax.jit
    def run():
        x, kernel = jnp.ones((4, 2, 3)), jnp.ones((2, 3, 5))
        y, pull = jax.vjp(lambda x, k: grouped_linear(x, k, jnp.array([0, 1, 1, 1]), jnp.array(2)), x, kernel)
        return y, *pull(jnp.ones_like(y))

    y, dx, dkernel = map(np.asarray, run())
    np.testing.assert_array_equal(y[:, 0, 0], [3, 3, 0, 0])
    np.testing.assert_array_equal(dx[:, 0, 0], [5, 5, 0, 0])
    np.testing.assert_array_equal(dkernel[:, 0, 0], [2, 2])


@pytest.mark.parametrize("capacity_factor", [None, 0.7])
def test_a_single_row_equals_its_row_in_a_batch(capacity_factor):
    module = layer(MoE(num_experts=5, capacity_factor=capacity_factor))
    params = parameters(module)
    apply = jax.jit(functools.partial(module.apply, deterministic=False))
    together, aux = jax.tree.map(np.asarray, apply(params, X))
    for row in range(3):
        alone, alone_aux = jax.tree.map(np.asarray, apply(params, np.asarray(X)[row : row + 1]))
        np.testing.assert_allclose(alone[0], together[row], rtol=1e-5, atol=1e-6)
        for name in aux:
            np.testing.assert_allclose(alone_aux[name][0], aux[name][row], rtol=1e-5)


def test_capacity_serves_tokens_in_their_order():
    chosen = np.array([[[0, 1], [0, 2], [1, 0], [0, 1]], [[2, 0], [2, 1], [2, 0], [0, 2]]])
    expected = [[[0, 1], [0, 2], [1, 3], [3, 3]], [[2, 0], [2, 1], [3, 0], [3, 3]]]
    found = jax.jit(functools.partial(within_capacity, num_experts=3, factor=0.75))(chosen)  # 2 of 8 choices
    np.testing.assert_array_equal(found, expected)


def kept(chosen, num_experts, factor):
    """Return which choices (n, k) of the tokens of one sequence an expert has room for, token by token."""
    room = np.full(num_experts, math.ceil(factor * len(chosen) * chosen.shape[1] / num_experts))
    found = np.zeros(chosen.shape, bool)
    for place, expert in np.ndenumerate(chosen):
        found[place] = room[expert] > 0
        room[expert] -= 1
    return found


def padding_array(segments):
    return Mask.causal() & Mask.array((segments > 0)[:, None, None])


@pytest.mark.parametrize("way", ["segments", "lengths", "array"])
def test_capacity_is_per_sequence_without_padding(way):
    """The drops of a sequence are those of the sequence alone; padding gets no expert."""
    random, experts, length = np.random.default_rng(0), 5, 30
    limit = jax.jit(functools.partial(within_capacity, num_experts=experts), static_argnames="factor")
    for factor in (0.5, 1.0, 1.25):
        chosen = np.argsort(random.random((4, length, experts)), axis=-1)[..., :2].astype(np.int32)
        ends = random.integers(3, length - 3, (4, 2))
        places, segments = np.arange(length)[None], np.zeros((4, length), np.int32)
        if way == "segments":  # padding, 1 sequence, padding, 1 to 3 sequences
            segments = np.sort(random.integers(0, 4, segments.shape), 1)
            segments[places == ends.min(1, keepdims=True)] = 0
            mask = Mask.segments(jax.device_put(segments))
        else:
            segments[places < ends[:, :1]] = 1
            mask = Mask.lengths(jax.device_put(ends[:, 0])) if way == "lengths" else padding_array(segments)
        found = np.asarray(limit(chosen, mask, factor=factor))
        expected = np.full_like(found, experts)
        for row in range(4):
            borders = np.flatnonzero(np.diff(segments[row], prepend=-1, append=-1))
            for first, last in itertools.pairwise(borders):
                if segments[row, first]:
                    part = chosen[row, first:last]
                    expected[row, first:last] = np.where(kept(part, experts, factor), part, experts)
        np.testing.assert_array_equal(found, expected)
        assert (expected[segments > 0] == experts).any() or factor > 0.5


@pytest.mark.parametrize("shared_experts", [0, 1])
def test_a_dropped_token_keeps_its_other_and_shared_experts(shared_experts):
    moe = MoE(num_experts=5, top_k=2, capacity_factor=0.4, shared_experts=shared_experts)
    module = layer(moe)
    params = parameters(module)
    logits = np.asarray(X) @ np.asarray(params["params"]["router"]["kernel"])
    there = np.stack([kept(row, 5, 0.4) for row in best(logits)])
    assert (~there).sum() > 5
    expected = by_token(module, params, X, there)
    apply = jax.jit(functools.partial(module.apply, deterministic=False))
    np.testing.assert_allclose(apply(params, X)[0], expected, rtol=1e-4, atol=1e-5)


def put_in_a_row(tokens, others, padding):
    """Return tokens (n,) after other tokens, and before padding: tokens, positions and segments, (1, T)."""
    parts = others, tokens, np.zeros(padding, np.int32)
    row, positions = np.concatenate(parts), np.concatenate([np.arange(len(part)) for part in parts])
    segments = np.repeat([1, 2, 0], [len(part) for part in parts])
    return jax.tree.map(lambda array: jax.device_put(array[None].astype(np.int32)), (row, positions, segments))


@pytest.mark.parametrize("factor", [None, 1.0, pytest.param(1.25, marks=pytest.mark.slow)])
def test_neighbors_padding_and_decoding_do_not_change_results(factor):
    """In training and evaluation, a single text has the logits of the text in a batch; decoding is evaluation."""
    kind = LayerKind(moe=MoE(num_experts=4, capacity_factor=factor))
    model = CausalLM(
        TransformerConfig(vocab_size=19, d_model=8, num_layers=2, num_heads=2, position=RotaryOptions()).replace(
            **{"stack.period": (kind,)}
        )
    )
    random = np.random.default_rng(0)
    first, other, text = (random.integers(1, 19, n).astype(np.int32) for n in (12, 12, 9))
    params = random_params(model, np.zeros((1, 2), np.int32))

    @functools.partial(jax.jit, static_argnames="deterministic")
    def run(row, deterministic):
        tokens, positions, segments = row
        return model.apply(params, tokens, positions, mask=Mask.segments(segments), deterministic=deterministic)

    @jax.jit
    def decode(chunks):
        def step(cache, chunk):
            logits, cache = model.apply(params, chunk[None], cache=cache, deterministic=False)
            return cache, logits[0]

        return jax.lax.scan(step, model.init_cache(1, chunks.size), chunks)[1].reshape(chunks.size, -1)

    found = {}
    for deterministic in (True, False):
        alone = np.asarray(run(put_in_a_row(text, first[:0], 0), deterministic))[0]
        for others in (first, other):
            beside = np.asarray(run(put_in_a_row(text, others, 5), deterministic))[0, 12 : 12 + len(text)]
            np.testing.assert_allclose(beside, alone, rtol=1e-4, atol=1e-5)
        found[deterministic] = alone
    np.testing.assert_allclose(decode(text.reshape(3, 3)), found[True], rtol=1e-4, atol=1e-5)
    drops = np.abs(found[True] - found[False]).max() > 0.01
    assert drops == (factor is not None), "a capacity limits training, and only training"


def test_a_training_step_applies_capacity_even_without_dropout():
    recipe = tiny_recipe(model={"stack.period": (LayerKind(moe=MoE(num_experts=3, capacity_factor=0.4)),)})
    state, step = start(recipe)
    batch = tiny_batch()
    _, metrics = step(state, batch)
    sums = jax.jit(make_eval_step(recipe))(state.params, batch)
    assert abs(float(metrics["loss_sum"]) - float(sums["loss_sum"])) > 1e-3
    model = recipes.build_model(recipe)

    def without(params):
        return training_loss("causal_lm", model, params, batch, recipe.training, None)[0]

    np.testing.assert_allclose(jax.jit(without)(state.params), sums["loss_sum"], rtol=1e-5)


def test_router_losses_equal_their_formulas():
    """Over the n real tokens of a row: n E sum f p, which is n for equal experts, and the sum of logsumexp^2."""
    logits = np.asarray(normal(0, 2, 7, 5))
    chosen = best(logits)
    balance, z = map(np.asarray, losses(logits, chosen, Mask.lengths(jax.device_put(np.array([4, 7])))))
    for row, n in enumerate((4, 7)):
        share = np.bincount(chosen[row, :n].ravel(), minlength=5) / (2 * n)
        exponentials = np.exp(logits[row, :n].astype(np.float64))
        probability = (exponentials / exponentials.sum(-1, keepdims=True)).mean(0)
        np.testing.assert_allclose(balance[row], n * 5 * (share * probability).sum(), rtol=1e-5)
        np.testing.assert_allclose(z[row], (np.log(exponentials.sum(-1)) ** 2).sum(), rtol=1e-5)
    even = losses(np.zeros((1, 5, 5), np.float32), np.arange(5, dtype=np.int32)[None, :, None])
    np.testing.assert_allclose([np.asarray(one)[0] for one in even], (5.0, 5 * math.log(5) ** 2), rtol=1e-5)
    nothing = losses(logits, chosen, Mask.lengths(jax.device_put(np.array([0, 0]))))[0]
    np.testing.assert_array_equal(nothing, [0, 0])


def test_packing_does_not_change_router_losses():
    logits = np.asarray(normal(0, 1, 9, 5))
    chosen = best(logits)
    parts = np.array([losses(logits[:, part], chosen[:, part]) for part in (slice(0, 4), slice(4, 9))])
    for second, expected in ((2, parts.sum(0)), (0, parts[0])):  # segment 0 is padding
        packed = losses(logits, chosen, Mask.segments(jax.device_put(np.array([[7] * 4 + [second] * 5]))))
        np.testing.assert_allclose(packed, expected, rtol=1e-5)


def test_the_balance_loss_balances():
    """Its gradient alone leads a router that sends all tokens to one expert to use all experts."""
    logits = np.array(normal(0, 1, 40, 5))
    logits[:, :, 0] += 2.0
    loss = jax.jit(jax.value_and_grad(lambda x: router_losses(x, jax.lax.top_k(x, 1)[1])[0].sum() / 40))
    first = loss(logits)[0]
    for _ in range(100):
        logits = logits - 20.0 * np.asarray(loss(logits)[1])
    assert first > 2.0
    assert loss(logits)[0] < 1.2


ROUTED, OTHER = LayerKind(moe=FIVE), LayerKind(moe=MoE(num_experts=3, d_ff=4, shared_experts=1))
SIZES = {"vocab_size": VOCABULARY, "d_model": 6, "num_layers": 5, "num_heads": 3, "feed_forward.d_ff": 7}
MIXED = TransformerConfig(**SIZES, stack=StackOptions(period=(ROUTED, LayerKind()), suffix=(OTHER,)))
KEY = jax.device_put(np.array([0, 1], np.uint32))
TOKENS = jax.device_put(np.random.default_rng(3).integers(0, VOCABULARY, (3, 11)).astype(np.int32))


@pytest.mark.parametrize(
    ("norm_position", "execution"),
    [
        pytest.param("pre", Execution(scan=False), marks=pytest.mark.slow),
        pytest.param("post", Execution(remat="names"), marks=pytest.mark.slow),
        pytest.param("pre_without_residual", Execution(remat="full"), marks=pytest.mark.slow),
    ],
)
def test_scan_unroll_and_remat_change_nothing(norm_position, execution):
    """A pattern with dense and routed layers; the aux of all layers is summed exactly once."""
    config = MIXED.replace(**{"norm.position": norm_position}, dropout_rate=0.2)
    params = parameters(Decoder(config))

    def run(execution):
        def loss(params):
            x, _, aux = Decoder(config, execution=execution).apply(
                params, X, mask=Mask.lengths(jnp.array([11, 7, 2])), deterministic=False, rngs={"dropout": KEY}
            )
            return (x * jnp.arange(6.0)[None, None]).sum() + sum(aux.values()).sum(), aux

        return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    expected = run(Execution())
    assert expected[0][1]["router_z"].shape == (3,)
    chex.assert_trees_all_close(run(execution), expected, rtol=1e-3, atol=1e-3)


def test_layers_add_up():
    """Three routed layers with equal parameters and equal input (no sublayer changes x) have three times the loss."""
    config = MIXED.replace(**{"stack.period": (ROUTED,), "stack.suffix": ()}, num_layers=3)
    model = CausalLM(config)
    params = parameters(model, TOKENS)
    layers = params["params"]["decoder"]["layers"]["slot_0"]
    for name in ("self_attention", "feed_forward"):
        layers[name] = jax.tree.map(np.zeros_like, layers[name])

    @jax.jit
    def run(params):
        return model.apply(params, TOKENS, method=CausalLM.with_aux), model.apply(params, TOKENS)

    (logits, aux), without = run(params)
    np.testing.assert_array_equal(logits, without)
    np.testing.assert_allclose(aux["load_balance"], np.full(3, 3 * 11.0), rtol=1e-5)
    np.testing.assert_allclose(aux["router_z"], np.full(3, 3 * 11 * math.log(5) ** 2), rtol=1e-5)


@pytest.mark.slow
def test_every_model_returns_its_auxiliary_losses():
    """The aux of both stacks is returned; without a routed layer it is empty."""
    even = LayerKind(moe=MoE(num_experts=5, top_k=5, load_balance_weight=1.0))  # then the loss is 1 per token
    config = MIXED.replace(
        **{"output.num_classes": 4, "stack.suffix": (), "stack.period": (even,), "stack.num_decoder_layers": 3},
        num_layers=2,
    )
    lengths = jnp.array([11, 7, 2])
    model = Classifier(config)
    variables = jax.jit(model.init)(KEY, TOKENS)
    call = jax.jit(functools.partial(model.apply, mask=Mask.lengths(lengths), method=Classifier.with_aux))
    logits, aux = call(variables, TOKENS)
    assert logits.shape == (3, 4)
    np.testing.assert_allclose(aux["load_balance"], 2 * lengths, rtol=1e-5)
    model = Seq2Seq(config)
    variables = jax.jit(model.init)(KEY, TOKENS, TOKENS[:, :5])
    call = jax.jit(functools.partial(model.apply, source_mask=Mask.lengths(lengths), method=Seq2Seq.with_aux))
    logits, aux = call(variables, TOKENS, TOKENS[:, :5])
    np.testing.assert_allclose(aux["load_balance"], 2 * lengths + 3 * 5, rtol=1e-5)
    dense = CausalLM(config.replace(**{"stack.period": (LayerKind(),)}))
    (_, aux), _ = jax.eval_shape(lambda: dense.init_with_output(KEY, TOKENS, method=CausalLM.with_aux))
    assert aux == {}


@pytest.mark.slow
def test_cached_is_uncached():
    model = CausalLM(MIXED)
    params = parameters(model, TOKENS)
    expected = jax.jit(model.apply)(params, TOKENS)
    call = jax.jit(lambda params, tokens, cache: model.apply(params, tokens, cache=cache))
    cache, found = model.init_cache(3, 11), []
    for part in [TOKENS[:, :4], *jnp.split(TOKENS[:, 4:], 7, axis=1)]:
        logits, cache = call(params, part, cache)
        found.append(logits)
    np.testing.assert_allclose(jnp.concatenate(found, axis=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["causal_lm", "seq2seq"])
def test_the_step_minimizes_both_losses_with_any_sharding(task):
    batch = tiny_batch(task)
    batch["weights"] = batch["weights"].at[6:].set(0.0)
    whole = tiny_recipe(task, model={"stack.period": (ROUTED,)}, optimizer={"epsilon": 1e-3})
    state, step = start(whole)
    expected, metrics = step(state, batch)
    parts = compiled_step(change(whole, training={"accumulation": 4}))(state, batch)
    unread = step(state, batch | {"tokens": batch["tokens"].at[6:].set(5)})
    for other, other_metrics in (parts, unread):
        chex.assert_trees_all_close(other.params, expected.params, atol=2e-5)
        for name in ("loss_sum", "router_loss", "weight", "grad_norm"):
            np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-4)
    model = recipes.build_model(whole)
    rest = batch, whole.training, None
    router_loss = jax.jit(lambda params: training_loss(task, model, params, *rest)[2])(state.params)
    np.testing.assert_allclose(metrics["router_loss"], router_loss, rtol=1e-5)
    sums = jax.jit(make_eval_step(whole))(state.params, batch)
    np.testing.assert_allclose(sums["loss_sum"], metrics["loss_sum"], rtol=1e-5)
    assert router_loss > 6 * 7

    def mean_loss(params):
        router_loss = training_loss(task, model, params, *rest)[2]
        logits = batch_outputs(task, model, params, batch)
        loss_sum, weight = cross_entropy(logits, batch["targets"], batch["weights"])
        return (loss_sum + router_loss) / weight

    gradient = jax.jit(jax.grad(mean_loss))(state.params)
    norm = np.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


def test_the_recipe_is_read_back():
    recipe = tiny_recipe(model={"stack.prefix": (OTHER,), "stack.period": (ROUTED,), "num_layers": 2})
    assert recipes.from_json(json.loads(json.dumps(recipes.to_json(recipe)))) == recipe


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("experts", "ambient"), [(4, True), (4, False), (5, True)])
def test_several_devices_equal_one_device(experts, ambient):
    """Experts are sharded over the mesh axis "expert", rows over both axes.

    With the mesh set, each device applies its own experts; 5 experts can't be split in 4 and are replicated. Without
    it, the compiler chooses the sharding.
    """
    module = layer(MoE(num_experts=experts, top_k=1, normalize_weights=False, shared_experts=1), gated=True)
    x = normal(0, 8, 5, 6)
    params = parameters(module, x)
    run = jax.value_and_grad(lambda p, x: ((y := module.apply(p, x))[0] ** 2).sum() + y[1]["router_z"].sum(), (0, 1))
    expected = jax.jit(run)(params, x)
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Auto,) * 2)

    def place(path, leaf):
        split = "experts" in jax.tree_util.keystr(path) and experts % 4 == 0
        return jax.device_put(np.asarray(leaf), NamedSharding(mesh, PartitionSpec("expert" if split else None)))

    params = jax.tree_util.tree_map_with_path(place, params)
    x = jax.device_put(np.asarray(x), NamedSharding(mesh, PartitionSpec(("data", "expert"))))
    if not ambient:
        chex.assert_trees_all_close(jax.jit(run)(params, x), expected, rtol=1e-4, atol=1e-5)
        return
    with jax.set_mesh(mesh):
        compiled = jax.jit(run).lower(params, x).compile()
        chex.assert_trees_all_close(compiled(params, x), expected, rtol=1e-4, atol=1e-5)
        kernel = (experts // 4 if experts % 4 == 0 else experts, 6, 7)
        assert f"f32[{','.join(map(str, kernel))}]" in compiled.as_text()
        assert experts % 4 or f"f32[{experts},6,7]" not in compiled.as_text()
