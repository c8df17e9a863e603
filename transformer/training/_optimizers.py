"""Optimizers and learning rate schedules, from a recipe. A path decides what decays and what Muon takes."""

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
"""number of updates before this one -> its learning rate"""


def make_schedule(recipe: Recipe) -> Schedule:
    """The learning rate of an update, as a function of how many came before it (0 at the first).

    With n = count + 1, w = warmup_steps, r = learning_rate, every schedule is r n / w up to n = w, and then

    - constant: r
    - cosine: from r down to r final_fraction at decay_steps (Loshchilov & Hutter 2017, arXiv 1608.03983, no restarts)
    - rsqrt: r sqrt(w / n)
    - noam: the same with r / sqrt(d_model w) as its height: d_model^-0.5 min(n^-0.5, n w^-1.5) for r = 1 (Vaswani et
      al. 2017, section 5.3)
    - wsd: r, and over the last decay_fraction of the updates up to decay_steps, but of none of the warm-up, linearly
      down to r final_fraction (warm-up, stable, decay: Hu et al. 2024, arXiv 2404.06395, section 4)
    """
    config, steps = recipe.optimizer, recipe.training.steps
    peak, warmup = config.learning_rate, config.warmup_steps
    if config.schedule == "noam":
        peak = peak / math.sqrt(recipe.model.d_model * warmup)
    after = {"constant": _constant, "cosine": _cosine, "rsqrt": _rsqrt, "noam": _rsqrt, "wsd": _wsd}[config.schedule]

    def schedule(count):
        number = jnp.asarray(count, jnp.float32) + 1.0
        rising = number / max(warmup, 1)
        return peak * jnp.where(number < warmup, rising, after(config, steps, number))

    return schedule


def _constant(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    return jnp.ones_like(number)


def _cosine(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    last = steps if config.decay_steps is None else config.decay_steps
    progress = jnp.clip((number - config.warmup_steps) / max(last - config.warmup_steps, 1), 0.0, 1.0)
    return config.final_fraction + (1.0 - config.final_fraction) * 0.5 * (1.0 + jnp.cos(math.pi * progress))


def _wsd(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    last = steps if config.decay_steps is None else config.decay_steps
    falling = min(config.decay_fraction * last, last - config.warmup_steps)
    left = jnp.clip((last - number) / max(falling, 1.0), 0.0, 1.0)
    return config.final_fraction + (1.0 - config.final_fraction) * left


def _rsqrt(config: OptimizerConfig, steps: int, number: jax.Array) -> jax.Array:
    return jnp.sqrt(config.warmup_steps / number)


def make_optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """Clipping by global norm, the optimizer's direction, decoupled weight decay by path, the schedule.

    Sources: clipping Pascanu et al. 2013, arXiv 1211.5063; Adam Kingma & Ba 2015, arXiv 1412.6980; Muon Jordan et al.
    2024; decoupled decay Loshchilov & Hutter 2019, arXiv 1711.05101.
    """
    config = recipe.optimizer
    if config.name == "muon":
        # optax's muon ends in its own learning rate: -1 gives the bare direction, so that decay and schedule are ours.
        direction = optax.contrib.muon(
            learning_rate=-1.0,
            beta=config.momentum,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            eps=config.epsilon,
            muon_weight_dimension_numbers=muon_dimensions,
            consistent_rms=0.2,  # makes its steps as long as adamw's, so that one learning rate serves both
        )
    else:
        direction = optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.epsilon)
    parts = [direction]
    if config.clip_norm is not None:
        parts.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        parts.append(optax.add_decayed_weights(config.weight_decay, mask=lambda params: decay_mask(config, params)))
    return optax.chain(*parts, optax.scale_by_learning_rate(make_schedule(recipe)))


def decay_mask(config: OptimizerConfig, params: Any) -> Any:
    """True for the leaves that weight decay shrinks: matrices; tables of token embeddings when the config says so.

    By declared axes and name, not by rank: norms and biases of a stack of layers have a second axis, too. Vectors
    (scales, biases, logits per head) and position tables never decay. A tied embedding is one leaf, and an embedding.
    """
    decaying = {"kernel", "embedding"} if config.decay_embeddings else {"kernel"}

    def decays(path, leaf):
        axes = axes_of(_path(path), leaf.ndim)
        is_matrix = axes is not None and axes.role != "vector" and not axes.is_table
        return is_matrix or _path(path).rpartition("/")[2] in decaying

    return jax.tree_util.tree_map_with_path(decays, params)


def muon_dimensions(params: Any) -> Any:
    """Input and output axes of each matrix that Muon takes, those declared as hidden (`nn/_parameter_axes.py`);
    None elsewhere: adamw with Nesterov's momentum (Dozat 2016), as optax has it beside Muon.

    Axes in front (layers of a stack, experts) are separate matrices. Embeddings, output heads and routers stay with
    adamw, as its author advises (Jordan et al. 2024).
    """

    def dimensions(path, leaf):
        axes = axes_of(_path(path), leaf.ndim)
        if axes is None or axes.role != "hidden":
            return None
        inputs, outputs = (tuple(leaf.ndim + axis for axis in part) for part in (axes.inputs, axes.outputs))
        return optax.contrib.MuonDimensionNumbers(inputs, outputs)

    return jax.tree_util.tree_map_with_path(dimensions, params)


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
