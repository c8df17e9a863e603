"""Random models for property tests: small configs of every kind, with parameters and tokens."""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

from transformer.config import (
    MLA,
    ALiBiOptions,
    AttentionOptions,
    EmbeddingOptions,
    Execution,
    FeedForwardOptions,
    HeadTransform,
    LayerKind,
    LearnedOptions,
    MoE,
    NormOptions,
    OutputOptions,
    ParameterOptions,
    QKNorm,
    RotaryOptions,
    RotaryScaling,
    SinusoidalOptions,
    StackOptions,
    T5BiasOptions,
    TransformerConfig,
)
from transformer.nn._masks import Mask
from transformer.nn.models import CausalLM, MaskedLM, Seq2Seq

MODELS = {"decoder": CausalLM, "encoder": MaskedLM, "encoder-decoder": Seq2Seq}
LONGEST = 13
"""maximum number of positions, which is the size of a learned position table"""
VOCABULARY, SOURCE_VOCABULARY = 11, 17


def often(few: int, many: int, strategy: st.SearchStrategy) -> Callable:
    """Turn a check of one random example into a test.

    The default test uses `few` examples, which are always the same. With -m slow, the test uses `many` examples, which
    differ in each run; the first one is the simplest, and Hypothesis shrinks a failing example.
    """
    counts = [few] if few else []
    counts.append(pytest.param(many, marks=pytest.mark.slow))
    varied = st.tuples(st.integers(0, 99).filter(bool), strategy).map(lambda pair: pair[1])

    def decorate(holds):
        @pytest.mark.parametrize("examples", counts)
        def test(examples):
            options = {"max_examples": examples, "deadline": None, "report_multiple_bugs": False}
            if examples == few:
                settings(**options, derandomize=True, phases=[Phase.generate])(given(varied)(holds))()
            else:
                phases = [Phase.reuse, Phase.generate, Phase.shrink]
                settings(**options, phases=phases, print_blob=True)(given(strategy)(holds))()
                jax.clear_caches()  # free the many programs that no other test needs

        test.__doc__ = holds.__doc__
        return test

    return decorate


@dataclass(frozen=True)
class Case:
    """A model for a property test. Its random parameters and tokens depend only on the seed."""

    kind: str
    config: TransformerConfig
    seed: int

    def _repr_pretty_(self, printer, cycle):
        """Print a failing example for Hypothesis."""
        printer.text(f"Case({self.kind!r}, {_short_repr(self.config)}, seed={self.seed})")

    def model(self, execution: Execution = Execution()):
        return MODELS[self.kind](self.config, execution)

    @functools.cached_property
    def params(self):
        """Random values for all parameters instead of the initial ones, so that norms and biases have an effect."""
        tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
        inputs = (tokens, tokens) if self.kind == "encoder-decoder" else (tokens,)
        shapes = jax.eval_shape(lambda *inputs: self.model().init(jax.random.key(0), *inputs), *inputs)["params"]
        random = np.random.default_rng(self.seed)
        # A frozen norm does not normalize: with kernels of the usual size, each layer would double its input.
        size = 0.5 if self.config.norm.kind == "frozen_batch_norm" else 1.0

        def make(path, leaf):
            number = random.normal(size=leaf.shape).astype(leaf.dtype)
            match path[-1].key:
                case "variance":
                    number = np.exp(number / 4)
                case "scale":
                    number = number / 4 + (self.config.norm.kind != "zero_centered_rms_norm")
                case "kernel":
                    number = size * number / np.sqrt(leaf.shape[-2])
                case _:
                    number = number / 2
            return jax.device_put(number.astype(leaf.dtype))  # jnp.asarray compiles a program for each shape

        return jax.tree_util.tree_map_with_path(make, shapes)

    def tokens(self, rows: int, length: int, source: bool = False) -> jax.Array:
        """Return random tokens (rows, length) of a source or a target.

        The tokens at a position do not depend on the number of rows and columns.
        """
        random = np.random.default_rng([self.seed, source])
        most = self.config.embedding.source_vocab_size or VOCABULARY if source else VOCABULARY
        return jax.device_put(random.integers(0, most, (64, 64))[:rows, :length].astype(np.int32))


def _short_repr(value: object) -> str:
    """Return the repr of a config without the fields that have their default value."""
    if isinstance(value, tuple):
        return f"({''.join(f'{_short_repr(part)}, ' for part in value)})"
    if not dataclasses.is_dataclass(value):
        return repr(value)
    fields = {field.name: (getattr(value, field.name), field.default) for field in dataclasses.fields(value)}
    changes = [f"{name}={_short_repr(given)}" for name, (given, default) in fields.items() if given != default]
    return f"{type(value).__name__}({', '.join(changes)})"


def routers() -> st.SearchStrategy[MoE]:
    """Return a strategy of routed feed-forward layers."""

    def make(groups, size, top_k, top_groups, **fields):
        top_groups = min(top_groups, groups)
        top_k = min(top_k, top_groups * size)
        normalize = fields.pop("normalize_weights") and top_k > 1
        sizes = {"num_experts": groups * size, "num_groups": groups, "top_groups": top_groups, "top_k": top_k}
        return MoE(**sizes, normalize_weights=normalize, **fields)

    return st.builds(
        make,
        groups=st.sampled_from([1, 1, 2]),
        size=st.integers(2, 5),
        top_k=st.integers(1, 3),
        top_groups=st.integers(1, 2),
        d_ff=st.sampled_from([None, 3]),
        shared_experts=st.integers(0, 2),
        normalize_weights=st.booleans(),
        capacity_factor=st.sampled_from([None, 0.5, 1.0]),
        router_bias=st.booleans(),
        scoring=st.sampled_from(["softmax", "sigmoid"]),
        e_score_correction_bias=st.booleans(),
        routed_scaling_factor=st.sampled_from([1.0, 2.5]),
    )


SCALINGS = [
    RotaryScaling(kind="linear", factor=3.0),
    RotaryScaling(kind="llama3", factor=8.0, original_length=16),
    RotaryScaling(kind="yarn", factor=4.0, original_length=16),
    RotaryScaling(kind="yarn", factor=4.0, original_length=16, attention_factor=0.7, truncate=False),
]


@st.composite
def layer_kinds(draw, rotary: bool, first_norm: bool) -> LayerKind:
    """Draw a kind of layer, for a config with rotary positions (`rotary`) or with pre-norm layers (`first_norm`)."""
    routed = draw(st.sampled_from([False, False, True]))
    moe = draw(routers()) if routed else None
    if draw(st.sampled_from([True] * 7 + [False])):
        return LayerKind(
            window=draw(st.sampled_from([None, 2, 1, 3, 5])),
            rotary_base=draw(st.sampled_from([None, 50.0])) if rotary else None,
            rotary_scaling=draw(st.none() | st.sampled_from(SCALINGS)) if rotary else None,
            moe=moe,
            attention_norm=draw(st.sampled_from([True, True, False])) if first_norm else True,
        )
    return LayerKind(self_attention=False, moe=moe)


SHAPES = [
    (0, 1, 0, 1),
    (0, 1, 0, 2),
    (0, 2, 0, 1),
    (1, 1, 0, 1),
    (0, 1, 1, 2),
    (1, 1, 0, 2),
    (1, 1, 1, 0),
    (0, 1, 0, 3),
]
"""numbers of layers in prefix, period and suffix, and repeats of the period. At most two kinds of layers, because each
takes a second to compile"""


@st.composite
def configs(draw, kind: str, repeats: int = 0) -> TransformerConfig:
    """Draw a small config of any model of this kind."""

    def one(*choices):
        return draw(st.sampled_from(choices))

    flag = functools.partial(draw, st.booleans())
    position = one(None, RotaryOptions, LearnedOptions, ALiBiOptions, T5BiasOptions, SinusoidalOptions)
    norm_position = one("pre", "post", "sandwich", "reordered", "pre_without_residual", "parallel")
    if kind == "encoder-decoder" and norm_position == "parallel":
        norm_position = "pre"
    rotary, first_norm = position is RotaryOptions, norm_position not in ("post", "reordered")
    latent = rotary and kind != "encoder-decoder" and one(False, False, True)

    kinds = layer_kinds(rotary, first_norm)
    prefix, period, suffix, times = one(*(shape for shape in SHAPES if shape[3] >= repeats))
    ends = prefix + suffix
    stacks = {"num_layers": ends + period * times}
    if kind == "encoder-decoder" and flag():
        stacks["stack.num_encoder_layers"] = max(period, ends) + period

    width, rotated = one(6, 10), {}
    if latent:
        sizes = {
            "kv_lora_rank": one(5, 17),
            "qk_nope_head_dim": one(3, 4),
            "qk_rope_head_dim": one(2, 4),
            "v_head_dim": one(5, 3),
        }
        mla = MLA(**sizes, q_lora_rank=one(None, 7), norm_epsilon=one(1e-6, 1e-2))
        heads = {"num_heads": one(1, 3, 4), "attention.mla": mla}
    else:
        kv_heads = one(1, 2, 3)
        heads = {"num_heads": kv_heads * one(1, 2, 3), "attention.num_kv_heads": kv_heads}
        if one(True, True, False):
            heads |= {
                "attention.head_dim": one(2, 4, 6),
                "attention.value_dim": one(None, 3, 5),
            }
            rotated = {"dim": one(None, 2)}
        else:
            width = heads["num_heads"] * one(4, 6)
        heads |= {"attention.sinks": flag(), "attention.qk_norm": one(None, QKNorm(), QKNorm(scope="all"))}
    all_biases = ("query", "key", "value", "out")
    biases = (None, all_biases) if latent else (None, all_biases, ("query", "key", "value"), ("key",), ())

    norm = one("layer_norm", "rms_norm", "zero_centered_rms_norm", "layer_norm_without_bias", "frozen_batch_norm")
    gated, activations = flag(), ("relu", "gelu_tanh", "gelu_erf", "silu", "tanh", "relu2")
    if norm == "frozen_batch_norm":  # it does not normalize, so products of activations could overflow
        gated, activations = False, ("relu", "tanh")
    tied = flag()
    fields = {
        RotaryOptions: {"base": one(10_000.0, 20.0), "scaling": one(None, *SCALINGS)} | rotated,
        LearnedOptions: {"max_length": LONGEST},
        T5BiasOptions: {"buckets": one(4, 7), "max_distance": one(8, 5), "per_layer": flag()},
        SinusoidalOptions: {"halves": flag()},
    }.get(position, {})
    return TransformerConfig(
        vocab_size=VOCABULARY,
        embedding=EmbeddingOptions(
            source_vocab_size=one(None, SOURCE_VOCABULARY) if kind == "encoder-decoder" else None,
            norm=flag(),
            scale=flag(),
            token_types=one(None, 3) if kind == "encoder" else None,
            tie=tied,
        ),
        d_model=width,
        feed_forward=FeedForwardOptions(
            d_ff=one(7, 5), activation=one(*activations, "swiglu_clamped") if gated else one(*activations), gated=gated
        ),
        **stacks,
        **heads,
        parameters=ParameterOptions(use_bias=flag()),
        attention=AttentionOptions(
            biases=one(*biases), scale=one(None, 1.0), softcap=one(None, 5.0), causal=kind == "encoder" and flag()
        ),
        norm=NormOptions(kind=norm, epsilon=one(1e-6, 1e-2), position=norm_position),
        stack=StackOptions(
            final_norm=flag(),
            prefix=tuple(draw(kinds) for _ in range(prefix)),
            period=tuple(draw(kinds) for _ in range(period)),
            suffix=tuple(draw(kinds) for _ in range(suffix)),
        ),
        position=position and position(**fields),
        output=OutputOptions(
            transform=one(None, HeadTransform(activation="gelu_tanh", norm=True)),
            bias=one(None, True),
            scale=one(None, 0.5),
            softcap=one(None, 20.0),
        ),
    )


@st.composite
def cases(draw, *kinds: str, **options) -> Case:
    """Draw a model of one of these kinds, or of any kind if none is given; `options` are those of `configs`."""
    kind = draw(st.sampled_from(kinds or tuple(MODELS)))
    return Case(kind, draw(configs(kind, **options)), draw(st.integers(0, 2**32 - 1)))


def rounding(run: Callable, params, *inputs) -> float:
    """Return the largest change in `run(params, *inputs)` if all parameters change by a few units in the last place."""
    random = np.random.default_rng(0)

    def move(leaf):
        return np.asarray(leaf) * (1 + 2.0**-22 * random.choice([-1, 1], leaf.shape)).astype(leaf.dtype)

    plain = jax.tree.leaves(jax.device_get(run(params, *inputs)))
    others = [jax.tree.leaves(jax.device_get(run(jax.tree.map(move, params), *inputs))) for _ in range(3)]
    moves = (
        np.abs(left - right).max(initial=0.0) for other in others for left, right in zip(other, plain, strict=True)
    )
    return max(float(one) for one in moves)


def assert_close(got, expected, tolerance: float = 1e-5, noise: float = 0.0):
    """Check that two trees are equal up to rounding.

    The tolerance is relative to the largest entry, because small entries may consist of rounding errors only. For
    models that amplify rounding errors, 8 x `noise` is added: `noise` is the effect of rounding the parameters once,
    and many operations round in sequence. If this exceeds a hundredth of the largest entry, the example can't show
    anything, and Hypothesis draws another one.
    """
    largest = np.array([1.0] + [np.abs(leaf).max(initial=0.0) for leaf in jax.tree.leaves(expected)]).max()
    assert np.isfinite(largest)
    if noise:
        assume(8 * noise < 0.01 * largest)
    check = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance * largest + 8 * noise)
    jax.tree.map(check, got, expected)


def pack_rows(rows: list[np.ndarray], groups: list[list[int]], length: int) -> dict[str, jax.Array]:
    """Pack the rows of each group into one row of `length`.

    Returns:
        `tokens`, `segments` (0 is padding) and `positions`, each (groups, length).
    """
    found = {name: np.zeros((len(groups), length), np.int32) for name in ("tokens", "segments", "positions")}
    for group, members in enumerate(groups):
        start = 0
        for segment, member in enumerate(members, start=1):
            size = len(rows[member])
            for name, numbers in {"tokens": rows[member], "segments": segment, "positions": np.arange(size)}.items():
                found[name][group, start : start + size] = numbers
            start += size
    return {name: jax.device_put(array) for name, array in found.items()}


def reader(case: Case, execution: Execution = Execution(), **options) -> Callable:
    """Return a function (params, batch) -> logits (B, T, V) and auxiliary outputs.

    It computes what a training step computes, in which experts can have a capacity.

    A batch has the arrays of `pack_rows`, or `lengths` instead of segments. An encoder-decoder also needs those of the
    source, with the prefix `source_`.
    """
    model = case.model(execution)

    def mask(batch, side=""):
        if f"{side}lengths" in batch:
            return Mask.lengths(batch[f"{side}lengths"])
        return Mask.segments(batch[f"{side}segments"])

    def read(params, batch):
        inputs, more = {"positions": batch["positions"], "mask": mask(batch)}, {"deterministic": False, **options}
        tokens = [batch["tokens"]]
        if case.kind == "encoder-decoder":
            tokens.insert(0, batch["source_tokens"])
            inputs |= {"source_positions": batch["source_positions"], "source_mask": mask(batch, "source_")}
            if "segments" in batch:
                inputs["context_mask"] = Mask.segments(batch["segments"], batch["source_segments"])
        elif case.config.embedding.token_types is not None:
            more["token_types"] = batch["tokens"] % case.config.embedding.token_types
        return model.apply({"params": params}, *tokens, **inputs, **more, method="with_aux")

    return read
