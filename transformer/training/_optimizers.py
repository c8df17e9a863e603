"""Optimizers and learning-rate schedules of a recipe.

The path of a parameter decides whether weight decay applies to it and whether Muon or AdamW updates it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jaxtyping import PyTree

from transformer.nn._parameter_axes import axes_of
from transformer.training._recipe import Recipe
from transformer.training._settings import OptimizerConfig

Schedule = Callable[[Any], jax.Array]
"""function from the number of previous updates to the learning rate of the next update"""


def make_schedule(recipe: Recipe) -> Schedule:
    """Return the learning rate as a function of `count`, the number of previous updates (0 for the first update).

    With n = count + 1, w = warmup_steps and r = learning_rate, every schedule is r n / w up to n = w (linear warm-up).
    After the warm-up it is

    - constant: r
    - cosine: from r to r final_fraction at decay_steps (Loshchilov & Hutter 2017, arXiv 1608.03983, without restarts)
    - rsqrt: r sqrt(w / n)
    - noam: rsqrt with peak r / sqrt(d_model w), which is d_model^-0.5 min(n^-0.5, n w^-1.5) for r = 1 (Vaswani et al.
      2017, section 5.3)
    - wsd: r, then a linear decay to r final_fraction over the last decay_fraction of the updates up to decay_steps; the
      decay never starts before the end of the warm-up (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395,
      section 4)
    """
    config, steps = recipe.optimizer, recipe.training.steps
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "noam":
        # The paper's rate at n = w: d_model^-0.5 w^-0.5. From there on, noam is rsqrt with this peak.
        peak = peak / math.sqrt(recipe.model.d_model * warmup)
    after = {"constant": _constant, "cosine": _cosine, "rsqrt": _rsqrt, "noam": _rsqrt, "wsd": _wsd}[config.schedule]

    def schedule(count):
        # n starts at 1: with n = 0 the first update would have a learning rate of 0.
        number = jnp.asarray(count, jnp.float32) + 1.0
        rising = number / max(warmup, 1)  # n / w; max avoids a division by 0 in the unused branch of `where`
        return peak * jnp.where(number < warmup, rising, after(config, steps, number))

    return schedule


def decay_end(recipe: Recipe) -> int | None:
    """Return the step at which the decay of the learning rate ends; None: the schedule has no end."""
    config = recipe.optimizer
    if config.schedule not in ("cosine", "wsd"):
        return None
    return recipe.training.steps if config.decay_steps is None else config.decay_steps


def learning_rates(recipe: Recipe, *counts: int) -> list[float]:
    """Return the learning rates of the updates after these numbers of previous updates."""
    return jax.jit(make_schedule(recipe))(jnp.asarray(counts)).tolist()


def _constant(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    return jnp.ones_like(number)


def _cosine(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    """f + (1 - f) (1 + cos(pi p)) / 2, where f is final_fraction and p the completed fraction of the decay."""
    last = steps if config.decay_steps is None else config.decay_steps
    # Clipped at 1: without it the cosine would rise again after the end of the decay.
    progress = jnp.clip((number - config.warmup_steps) / max(last - config.warmup_steps, 1), 0.0, 1.0)
    return config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (1.0 + jnp.cos(math.pi * progress))


def _wsd(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    """f + (1 - f) q, where f is final_fraction and q the remaining fraction of the decay (1 before the decay)."""
    last = steps if config.decay_steps is None else config.decay_steps
    falling = min(config.decay_fraction * last, last - config.warmup_steps)  # updates of the decay
    left = jnp.clip((last - number) / max(falling, 1.0), 0.0, 1.0)
    return config.final_fraction + (1.0 - config.final_fraction) * left


def _rsqrt(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    return jnp.sqrt(config.warmup_steps / number)  # 1 at n = w, so it continues the warm-up without a jump


def make_optimizer(recipe: Recipe) -> optax.GradientTransformationExtraArgs:
    """Return a recipe's optimizer: clipping by global norm, the direction, weight decay and the learning rate.

    Its `update` also takes the loss as a function of the parameters, `obj_fn`, which only sophia uses. Sources:
    clipping, Pascanu et al. 2013, arXiv 1211.5063; decoupled weight decay, Loshchilov & Hutter 2019, arXiv 1711.05101.
    Those of the directions are at `DIRECTIONS`.
    """
    config, schedule = recipe.optimizer, make_schedule(recipe)
    parts = [DIRECTIONS[config.name](config)]
    if config.clip_norm is not None:  # before the direction: the moving averages must not see unclipped gradients
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    # After the direction: decay that is added to the gradient would be rescaled by 1 / sqrt(v), which is L2
    # regularization and not decoupled weight decay. The learning rate multiplies both.
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(config, params)))
    optimizer = optax.chain(*parts, optax.scale_by_learning_rate(schedule))
    if config.name in AVERAGED:
        # Replaces momentum by an average of the iterates (Defazio et al. 2024, arXiv 2405.15682).
        optimizer = optax.contrib.schedule_free(optimizer, schedule, b1=config.beta1)
    return optax.with_extra_args_support(optimizer)


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    # m / (sqrt(v) + epsilon), with bias-corrected moving averages m of g and v of g^2 (decays beta1 and beta2).
    return optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)


def _adam_without_momentum(config: OptimizerConfig) -> optax.GradientTransformation:
    # g / (sqrt(v) + epsilon), without storing m
    return optax.scale_by_rms(decay=config.beta2, eps=config.epsilon, eps_in_sqrt=False, bias_correction=True)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    # g / sqrt(v), where v of a matrix is the outer product of its row and column means: R + C numbers instead of R C.
    # Without the factor RMS(parameter), so that the learning rate has the same unit as that of the other optimizers.
    # The RMS of an update is limited to 1 (section 6). optax would limit that of all stacked layers together.
    scaled = optax.adafactor(multiply_by_parameter_scale=False, clipping_threshold=None)
    return optax.chain(_on_matrices(scaled), _clip_each_by_rms(1.0), optax.scale(-1.0))


def _on_matrices(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation to parameters in which each matrix has one axis of inputs and one of outputs.

    Without this, adafactor would take the two largest axes of a kernel (D, N, H) for rows and columns.
    """

    def matrices(tree):
        def reshaped(path, leaf):
            axes = axes_of(_path(path), leaf.ndim)
            if axes is None or not axes.inputs or axes.inputs[0] > axes.outputs[0]:  # a vector or a table
                return leaf
            lead = leaf.ndim - len(axes.inputs) - len(axes.outputs)  # stacked layers, experts
            inputs = math.prod(leaf.shape[lead : lead + len(axes.inputs)])
            return leaf.reshape(*leaf.shape[:lead], inputs, -1)

        return jax.tree_util.tree_map_with_path(reshaped, tree)

    def update(updates, state, params=None):
        found, state = inner.update(matrices(updates), state, matrices(params))
        return jax.tree.map(lambda new, old: new.reshape(old.shape), found, updates), state

    return optax.GradientTransformation(lambda params: inner.init(matrices(params)), update)


def _clip_each_by_rms(limit: float) -> optax.GradientTransformation:
    """Scale the update of each matrix or vector down to at most this root mean square.

    Leading axes (stacked layers, experts) index separate matrices: scanning the layers must not change the result.
    """

    def clipped(path: tuple, update: jax.Array) -> jax.Array:
        own = tuple(range(_leading_axes(_path(path), update.ndim), update.ndim))
        rms = jnp.sqrt(jnp.square(update).mean(own, keepdims=True))
        return update / jnp.maximum(1.0, rms / limit)

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(clipped, updates))


def _leading_axes(path: str, ndim: int) -> int:
    """Return the number of leading axes of a parameter that index separate matrices or vectors."""
    axes = axes_of(path, ndim)
    if axes is None:  # the matrices and magnitudes of LoRA have the leading axes of their kernel
        own = {"a": 2, "b": 2, "magnitude": 1}.get(path.rpartition("/")[2], ndim)
        return ndim - own
    return ndim - (len(axes.inputs) + len(axes.outputs) or len(axes.names))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    # optax's muon multiplies by minus its learning rate as the last step. With -1 it returns the direction alone,
    # so that the weight decay and the schedule apply to it as they do to Adam's direction.
    return optax.contrib.muon(
        learning_rate=-1.0,
        beta=config.momentum,
        adam_b1=config.beta1,
        adam_b2=config.beta2,
        eps=config.epsilon,
        muon_weight_dimension_numbers=muon_dimensions,
        # Scales each orthogonalized update to an RMS of about 0.2, a typical RMS of AdamW's updates, so that the
        # same learning rate suits both (Liu et al. 2025, arXiv 2502.16982, section 2.2).
        consistent_rms=0.2,
    )


def _sophia(config: OptimizerConfig) -> optax.GradientTransformation:
    # clip(m / max(gamma h, epsilon), 1), where h is a moving average of the Hessian's diagonal.
    # Like muon, optax's sophia includes the learning rate.
    decays = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    return optax.contrib.sophia(-1.0, **decays, weight_decay=0.0, hessian_diagonal_fn=_hutchinson())


def _hutchinson() -> optax.GradientTransformationExtraArgs:
    """Return a transformation from a gradient to an estimate of the diagonal of the Hessian H: u * (H u).

    u is a vector of random signs (Hutchinson 1989). H u is the gradient of the scalar g(params) . u. Unlike a forward
    derivative of the gradient, as in optax's own estimator, this works for functions with a custom backward pass.
    """

    def init(params):
        return optax.contrib.HutchinsonState(key=jax.random.PRNGKey(0))

    def update(updates, state, params=None, *, obj_fn, **unused):
        key, own = jax.random.split(state.key)
        signs = optax.tree.random_like(own, params, jax.random.rademacher)
        product = jax.grad(lambda params: optax.tree.vdot(jax.grad(obj_fn)(params), signs))(params)
        return jax.tree.map(jnp.multiply, product, signs), optax.contrib.HutchinsonState(key=key)

    return optax.GradientTransformationExtraArgs(init, update)


DIRECTIONS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": _adam,  # Kingma & Ba 2015, arXiv 1412.6980
    "adafactor": _adafactor,  # Shazeer & Stern 2018, arXiv 1804.04235
    "lion": lambda config: optax.scale_by_lion(b1=config.beta1, b2=config.beta2),  # Chen et al. 2023, arXiv 2302.06675
    "muon": _muon,  # Jordan et al. 2024
    "schedule_free_adamw": _adam_without_momentum,
    "sophia": _sophia,  # Liu et al. 2023, arXiv 2305.14342
}
"""direction of the update before weight decay and learning rate, by the name of the optimizer"""

AVERAGED = ("schedule_free_adamw",)
"""optimizers that average the parameters themselves; the average, `TrainState.ema`, is evaluated and used"""


def decay_mask(config: OptimizerConfig, params: PyTree) -> PyTree:
    """Return a tree of booleans: True for the leaves that weight decay applies to.

    These are the matrices and, with `decay_embeddings`, the tables of token embeddings. Vectors (scales, biases, logits
    per head) and position tables never decay. A tied embedding is a single leaf and counts as an embedding.

    The declared axes and the name decide, not the rank: in a stack of layers, norms and biases have two axes too.
    """
    decaying = {"kernel", "embedding"} if config.decay_embeddings else {"kernel"}

    def decays(path, leaf):
        axes = axes_of(_path(path), leaf.ndim)
        is_matrix = axes is not None and axes.role != "vector" and not axes.is_table
        return is_matrix or _path(path).rpartition("/")[2] in decaying

    return jax.tree_util.tree_map_with_path(decays, params)


def muon_dimensions(params: PyTree) -> PyTree:
    """Return the input and output axes of each matrix that Muon updates, and None for all other parameters.

    Muon updates the matrices that are declared as hidden (`nn/_parameter_axes.py`). The leading axes (stacked layers,
    experts) index separate matrices. All other parameters, among them embeddings, output heads and routers, are updated
    by AdamW, as the author of Muon recommends (Jordan et al. 2024); optax combines Muon with the variant of AdamW that
    has Nesterov momentum (Dozat 2016).
    """

    def dimensions(path, leaf):
        axes = axes_of(_path(path), leaf.ndim)
        if axes is None or axes.role != "hidden":
            return None
        # Declared axes count from the end, optax counts from the front.
        inputs, outputs = (tuple(leaf.ndim + axis for axis in part) for part in (axes.inputs, axes.outputs))
        return optax.contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
