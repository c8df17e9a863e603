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


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Return a recipe's optimizer: clipping by global norm, the direction, weight decay and the learning rate.

    Sources: clipping, Pascanu et al. 2013, arXiv 1211.5063; Adam, Kingma & Ba 2015, arXiv 1412.6980; Muon, Jordan et
    al. 2024; decoupled weight decay, Loshchilov & Hutter 2019, arXiv 1711.05101.
    """
    config = recipe.optimizer
    if config.name == "muon":
        # optax's muon multiplies by minus its learning rate as the last step. With -1 it returns the direction alone,
        # so that the weight decay and the schedule below apply to it as they do to Adam's direction.
        direction = optax.contrib.muon(
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
    else:
        # m / (sqrt(v) + epsilon), with bias-corrected moving averages m of g and v of g^2 (decays beta1 and beta2).
        direction = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    parts = [direction]
    if config.clip_norm is not None:  # before the direction: the moving averages must not see unclipped gradients
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    # After the direction: decay that is added to the gradient would be rescaled by 1 / sqrt(v), which is L2
    # regularization and not decoupled weight decay. The learning rate multiplies both.
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(config, params)))
    return optax.chain(*parts, optax.scale_by_learning_rate(make_schedule(recipe)))


def decay_mask(config: OptimizerConfig, params: Any) -> Any:
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


def muon_dimensions(params: Any) -> Any:
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
