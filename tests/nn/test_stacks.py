"""Blocks and stacks: equations, the pattern of layers, and results that scan and remat don't change."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import jaxprs_in_params
from numeric_parts import random_params

from transformer.config import (
    ConfigError,
    Execution,
    FeedForwardOptions,
    LayerKind,
    LearnedOptions,
    RotaryOptions,
    StackOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.nn._attention import MultiHeadAttention
from transformer.nn._blocks import BLOCKS, LayerCache, LayerInputs, PostNormBlock, PreNormBlock
from transformer.nn._caches import cache_length
from transformer.nn._masks import Mask
from transformer.nn._stacks import Decoder, Encoder
from transformer.nn.layers._layers import FeedForward
from transformer.nn.layers._norms import RMSNorm
from transformer.training._state import parameter_paths

CONFIG = TransformerConfig(d_model=12, num_layers=2, num_heads=3, feed_forward=FeedForwardOptions(d_ff=7))
NUMPY_X = np.random.default_rng(0).normal(size=(2, 5, 12)).astype(np.float32)
X = jax.device_put(NUMPY_X)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_blocks_equal_their_equations(norm):
    config = CONFIG.replace(**{"norm.kind": norm})
    inputs = LayerInputs(mask=Mask.causal())

    def equation(block_class, params, x):
        class Written(block_class):
            @nn.compact
            def __call__(self, x):
                if block_class is PreNormBlock:
                    x = x + self.attend_to_self(self.norm("attention_norm")(x), inputs, None).x
                    return x + self.apply_feed_forward(self.norm("feed_forward_norm")(x), inputs).x
                x = self.norm("attention_norm")(x + self.attend_to_self(x, inputs, None).x)
                return self.norm("feed_forward_norm")(x + self.apply_feed_forward(x, inputs).x)

        return Written(config).apply(params, x)

    outs = []
    for block_class in (PreNormBlock, PostNormBlock):
        block = block_class(config)

        @jax.jit
        def run(params, block=block, block_class=block_class):
            out = block.apply(params, X, inputs)
            assert (out.cache, out.stored, out.aux) == (None, None, {})
            return out.x, equation(block_class, params, X)

        out, expected = map(np.asarray, run(random_params(block, X, inputs)))
        np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)
        outs.append(out)
    assert np.abs(outs[0] - outs[1]).max() > 0.1


def sandwich(x, attend, feed, norm):
    x = x + norm("attention_post_norm", attend(norm("attention_norm", x)))
    return x + norm("feed_forward_post_norm", feed(norm("feed_forward_norm", x)))


def reordered(x, attend, feed, norm):
    x = x + norm("attention_norm", attend(x))
    return x + norm("feed_forward_norm", feed(x))


def parallel(x, attend, feed, norm):
    return x + attend(norm("attention_norm", x)) + feed(norm("feed_forward_norm", x))


EQUATIONS = {"sandwich": sandwich, "reordered": reordered, "parallel": parallel}


def parts(config, params):
    """Return attention, feed-forward and norms of a layer as separate functions with the layer's parameters."""

    def norm(name, x):
        return RMSNorm(config.norm.epsilon).apply({"params": params[name]}, x)

    def attend(x):
        module = MultiHeadAttention(num_heads=config.num_heads)
        return module.apply({"params": params["self_attention"]}, x, mask=Mask.causal())[0]

    def feed(x):
        return FeedForward(width=config.feed_forward_width).apply({"params": params["feed_forward"]}, x)

    return attend, feed, norm


@pytest.mark.parametrize("norm_position", EQUATIONS)
def test_other_norm_positions_equal_their_equations(norm_position):
    config = CONFIG.replace(**{"norm.kind": "rms_norm", "norm.position": norm_position})
    block, inputs = BLOCKS[norm_position](config), LayerInputs(mask=Mask.causal())

    @jax.jit
    def run(params):
        return block.apply(params, X, inputs).x, EQUATIONS[norm_position](X, *parts(config, params["params"]))

    np.testing.assert_allclose(*run(random_params(block, X, inputs)), rtol=1e-4, atol=1e-5)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("norm_position", EQUATIONS)
def test_a_cache_does_not_change_other_norm_positions(norm_position):
    config = CONFIG.replace(**{"norm.position": norm_position}, position=RotaryOptions(), num_layers=1)
    decoder = Decoder(config, cross=norm_position != "parallel")
    context = {} if norm_position == "parallel" else {"context": jax.device_put(NUMPY_X[:, :3] + 1)}
    params = random_params(decoder, X, **context)
    step = jax.jit(decoder.apply)
    whole, _, _ = step(params, X, **context)
    cache = jax.jit(lambda: decoder.init_cache(2, 5))()
    first, cache, _ = step(params, NUMPY_X[:, :3], **context, cache=cache)
    rest, _, _ = step(params, NUMPY_X[:, 3:], cache=cache)
    np.testing.assert_allclose(np.concatenate([first, rest], 1), whole, rtol=1e-4, atol=1e-5)
    assert "final_norm" in params["params"]


def test_a_parallel_layer_rejects_cross_attention():
    decoder = Decoder(CONFIG.replace(**{"norm.position": "parallel"}), cross=True)
    with pytest.raises(ConfigError, match=r"'parallel'.*norm.position"):
        jax.eval_shape(lambda: decoder.init(jax.random.key(0), X, X))


def test_a_layer_without_its_first_norm_reads_x_unchanged():
    kind = LayerKind(attention_norm=False)
    block = PreNormBlock(CONFIG.replace(**{"norm.kind": "rms_norm"}), kind)
    inputs = LayerInputs(mask=Mask.causal())
    params = random_params(block, X, inputs)

    @jax.jit
    def run(params):
        attend, feed, norm = parts(block.config, params["params"])
        x = X + attend(X)
        return block.apply(params, X, inputs).x, x + feed(norm("feed_forward_norm", x))

    np.testing.assert_allclose(*run(params), rtol=1e-4, atol=1e-5)
    assert "attention_norm" not in params["params"]


def test_embeddings_are_normalized_after_positions_and_before_dropout():
    config = CONFIG.replace(**{"norm.kind": "rms_norm", "embedding.norm": True}, position=LearnedOptions(max_length=5))
    encoder = Encoder(config)
    without = Encoder(CONFIG.replace(**{"norm.kind": "rms_norm"}, position=None))

    @jax.jit
    def run(variables):
        params = variables["params"]
        plain = {name: leaf for name, leaf in params.items() if name not in ("embedding_norm", "position_table")}
        norm = RMSNorm(config.norm.epsilon)
        x = norm.apply({"params": params["embedding_norm"]}, X + params["position_table"][None])
        return encoder.apply(variables, X)[0], without.apply({"params": plain}, x)[0]

    np.testing.assert_allclose(*run(random_params(encoder, X)), rtol=1e-4, atol=1e-5)


def test_layers_read_their_own_bias_tables():
    """With equal tables the result is that of one table for the stack; and each table has an effect."""
    t5 = {"position": T5BiasOptions(), "position.buckets": 8, "position.max_distance": 6}
    shared, own = Encoder(CONFIG.replace(**t5)), Encoder(CONFIG.replace(**t5, **{"position.per_layer": True}))
    params = random_params(shared, X)["params"]
    table = np.asarray(params.pop("position_table"))
    slot = params["layers"]["slot_0"]
    alike = params | {"layers": {"slot_0": slot | {"position_table": np.stack([table, table])}}}
    expected, _, _ = jax.jit(shared.apply)({"params": params | {"position_table": table}}, X)
    run = jax.jit(lambda params: own.apply({"params": params}, X)[0])
    np.testing.assert_allclose(run(alike), expected, rtol=1e-4, atol=1e-5)
    assert jax.tree.map(jnp.shape, jax.eval_shape(lambda: own.init(jax.random.key(0), X))["params"]) == jax.tree.map(
        jnp.shape, alike
    )
    for layer in (0, 1):
        tables = np.stack([table, table])
        tables[layer] *= -1
        changed = params | {"layers": {"slot_0": slot | {"position_table": tables}}}
        assert np.abs(np.asarray(run(changed)) - np.asarray(expected)).max() > 1e-3


def test_dropout_is_applied_as_in_the_paper():
    """Dropout applies to the output of each sublayer before the sum, and to embeddings plus positions: with a rate
    near 1, the output of a pre-norm stack is almost 0.
    """
    config = CONFIG.replace(dropout_rate=0.999999)
    stack = Encoder(config)
    block = PreNormBlock(config)

    @jax.jit
    def run(params, block_params):
        rngs = {"dropout": jax.random.key(1)}
        out = block.apply(block_params, X, LayerInputs(deterministic=False), rngs=rngs).x
        return out, stack.apply(params, X, deterministic=False, rngs=rngs)[0]

    params = random_params(stack, X)
    out, whole = run(params, random_params(block, X, LayerInputs()))
    np.testing.assert_array_equal(out, X)
    # The final norm makes its bias of 0.
    np.testing.assert_array_equal(whole, np.broadcast_to(params["params"]["final_norm"]["bias"], X.shape))


LAYERS = {"stack.period": (LayerKind(window=2), LayerKind(rotary_base=99.0)), "stack.suffix": (LayerKind(window=3),)}
SIZES = {"d_model": 12, "num_layers": 6, "num_heads": 3, "feed_forward.d_ff": 7}
PATTERN = TransformerConfig(
    **SIZES, position=RotaryOptions(), dropout_rate=0.2, stack=StackOptions(prefix=(LayerKind(),)), **LAYERS
)


def test_parameter_paths_are_the_layout():
    params = jax.eval_shape(lambda: Decoder(PATTERN).init(jax.random.key(0), X))["params"]
    assert sorted(params) == ["final_norm", "layers", "prefix_0", "suffix_0"]
    assert sorted(params["layers"]) == ["slot_0", "slot_1"]
    assert params["layers"]["slot_1"]["self_attention"]["query"]["kernel"].shape == (2, 12, 3, 4)
    assert params["prefix_0"]["self_attention"]["query"]["kernel"].shape == (12, 3, 4)
    learned = PATTERN.replace(position=LearnedOptions(max_length=9), **{"norm.position": "post"})
    params = jax.eval_shape(lambda: Decoder(learned).init(jax.random.key(0), X))["params"]
    assert params["position_table"].shape == (9, 12)
    assert "final_norm" not in params


def test_repeated_layers_are_initialized_differently():
    @jax.jit  # without the other parameters, it compiles in less time
    def initialized():
        params = Decoder(PATTERN).init(jax.random.key(0), X)["params"]
        return params["layers"]["slot_0"]["feed_forward"]["up"]["kernel"]

    kernel = np.asarray(initialized())
    assert np.abs(kernel[0] - kernel[1]).max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "execution",
    [
        Execution(scan=False),
        Execution(remat="full"),
        Execution(remat="names"),
        Execution(remat="dots", scan=False),
    ],
    ids=lambda execution: f"scan {execution.scan}, remat {execution.remat}",
)
def test_scan_unroll_and_remat_change_nothing(execution):
    params = jax.jit(Decoder(PATTERN).init)(jax.random.key(0), X)

    def run(execution):
        def loss(params):
            out, _, _ = Decoder(PATTERN, execution=execution).apply(
                params, X, deterministic=False, rngs={"dropout": jax.random.key(1)}
            )
            return (out * jnp.arange(12.0)[None, None]).sum()

        return jax.jit(jax.value_and_grad(loss))(params)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), run(execution), run(Execution()))


def test_remat_policies_store_the_documented_values():
    """Number of matrix multiplications in the backward pass for each policy: all recomputed, or only some."""

    def count(remat):
        stack = Encoder(CONFIG.replace(num_layers=1), execution=Execution(remat=remat, scan=False))
        params = jax.eval_shape(lambda: stack.init(jax.random.key(0), X))
        text = str(jax.make_jaxpr(jax.grad(lambda p: stack.apply(p, X)[0].sum()))(params))
        return text.count("dot_general")

    none, full, dots, names = map(count, ("none", "full", "dots", "names"))
    assert none < dots < full
    assert none < names < full


def jacobian_of(stack, params):
    """Return the derivatives (T, D, T, D) of the outputs of the first row by its inputs."""
    run = jax.jit(jax.jacobian(lambda row: stack.apply(params, row[None])[0][0]))
    return np.asarray(run(NUMPY_X[0]))


def test_a_window_limits_its_own_layers():
    """With window 2, an output depends on its own and the previous input; after two such layers, on two previous."""
    config = CONFIG.replace(**{"stack.period": (LayerKind(window=2),)}, num_layers=2)
    decoder = Decoder(config)
    jacobian = jacobian_of(decoder, random_params(decoder, X))
    distance = np.arange(5)[:, None] - np.arange(5)[None, :]
    np.testing.assert_array_equal(np.abs(jacobian).max((1, 3)) > 0, (distance >= 0) & (distance <= 2))


def test_an_encoder_is_bidirectional_and_a_decoder_causal():
    for stack, seen in ((Encoder(CONFIG), np.ones((5, 5), bool)), (Decoder(CONFIG), np.tri(5, dtype=bool))):
        jacobian = jacobian_of(stack, random_params(stack, X))
        np.testing.assert_array_equal(np.abs(jacobian).max((1, 3)) > 0, seen)


@pytest.mark.parametrize("norm_position", ["pre", "post", "pre_without_residual"])
def test_without_self_attention_positions_are_independent(norm_position):
    config = CONFIG.replace(**{"norm.position": norm_position, "stack.period": (LayerKind(self_attention=False),)})
    decoder = Decoder(config)
    params = random_params(decoder, X)
    assert not [path for path in parameter_paths(params) if "attention" in path]
    jacobian = jacobian_of(decoder, params)
    np.testing.assert_array_equal(np.abs(jacobian).max((1, 3)) > 0, np.eye(5, dtype=bool))


def test_without_residual_a_sublayer_replaces_x():
    """If the last projection is zero, x + f(norm(x)) is x, and f(norm(x)) is zero."""
    for norm_position, left in (("pre", X), ("pre_without_residual", np.zeros_like(X))):
        block = BLOCKS[norm_position](CONFIG)
        params = jax.tree_util.tree_map_with_path(
            lambda path, leaf: np.zeros_like(leaf) if "down" in str(path) or "out" in str(path) else leaf,
            random_params(block, X, LayerInputs()),
        )
        np.testing.assert_array_equal(jax.jit(block.apply)(params, X, LayerInputs()).x, left)


@pytest.mark.slow
def test_a_cache_counts_tokens_without_self_attention():
    config = PATTERN.replace(**{"stack.prefix": (LayerKind(self_attention=False),)})
    cache = Decoder(config).init_cache(2, 9)
    assert cache["prefix_0"].self_attention.key.shape == (2, 0, 9, 0)
    decoder = Decoder(config)
    params = jax.jit(decoder.init)(jax.random.key(0), X)
    _, cache, _ = decoder.apply(params, X, cache=decoder.init_cache(X.shape[0], 9), deterministic=True)
    assert cache_length(cache).tolist() == [X.shape[1]] * X.shape[0]


def test_each_layer_has_its_own_cache():
    decoder = Decoder(PATTERN, cross=True)
    cache = jax.eval_shape(lambda: decoder.init_cache(2, 9))
    assert sorted(cache) == ["layers", "prefix_0", "suffix_0"]
    assert isinstance(cache["prefix_0"], LayerCache)
    assert cache["layers"]["slot_0"].self_attention.key.shape == (2, 2, 3, 9, 4)
    assert cache["prefix_0"].cross_attention.key is None


def test_cross_attention_without_a_context_is_an_error():
    with pytest.raises(ValueError, match="nothing to attend to: pass a context"):
        jax.eval_shape(lambda: Decoder(CONFIG, cross=True).init(jax.random.key(0), X))


def test_only_scanned_layers_may_merge_with_their_recomputation():
    """XLA would undo remat if no loop separates the two computations (`prevent_cse` of jax.checkpoint)."""
    found = []

    def walk(jaxpr, looped):
        for eqn in jaxpr.eqns:
            if "prevent_cse" in eqn.params:
                found.append((looped, eqn.params["prevent_cse"]))
            for inner in jaxprs_in_params(eqn.params):
                walk(inner, looped or eqn.primitive.name == "scan")

    config = CONFIG.replace(**{"stack.prefix": (LayerKind(),), "stack.suffix": (LayerKind(),)}, num_layers=4)
    stack = Encoder(config, execution=Execution(remat="full"))
    params = jax.eval_shape(lambda: stack.init(jax.random.key(0), X))
    walk(jax.make_jaxpr(stack.apply)(params, X).jaxpr, looped=False)
    assert sorted(found) == [(False, True), (False, True), (True, False)]
