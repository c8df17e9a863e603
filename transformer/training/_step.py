"""The training step: one pure body for one device, for accumulation and for any number of devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer.nn._axes import PRNGKey
from transformer.training._chunked_loss import loss_in_chunks, sum_in_chunks, tokens_at_once
from transformer.training._losses import Batch, Scalar
from transformer.training._optimizers import make_optimizer, make_schedule
from transformer.training._recipe import Recipe, build_model
from transformer.training._settings import TrainingConfig
from transformer.training._state import TrainState, model_params
from transformer.training._tasks import TASKS, Outputs, Sums

Metrics = dict[str, jax.Array]
"""scalars by name"""
TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""what `make_train_step` makes; the arguments are a state, a batch and, or not, a limit, ()"""
EvalStep = Callable[[Any, Batch], Metrics]
"""what `make_eval_step` makes; the first argument is the parameters"""


class NonFiniteError(ArithmeticError):
    """A number was not finite, and the recipe says to stop. The state is that of the step before."""


def make_train_step(recipe: Recipe, axis_name: str | None = None) -> TrainStep:
    """A pure function (state, batch, limit) -> (state, metrics), for `jax.jit`, or for `jax.pmap` over `axis_name`.

    Losses are summed and divided once by the weight of the whole batch, over micro-batches and over `axis_name`, so
    that any split gives the same number to rounding. Rows of weight 0 count nothing.

    Metrics (scalars): `loss_sum`, `weight`, `grad_norm` (before clipping), `learning_rate`, `skipped` (so far), and
    `finite`, `first_bad`, `first_bad_weight` for `check_finite`; with routed layers `router_loss`, a sum (nats) that is
    minimized beside `loss_sum`. A step whose loss, gradient or new parameters are not finite leaves parameters,
    optimizer and average as they were; with nan_policy "stop" so does every step after it. So does a step whose mean
    loss is above the `limit`, in the same unit, that it is given: a spike's (Chowdhery et al. 2022, arXiv 2204.02311,
    section 5.1, pass over such batches).
    """
    training, optimizer, schedule = recipe.training, make_optimizer(recipe), make_schedule(recipe)
    loss = _summed_loss(recipe)

    def step(state: TrainState, batch: Batch, limit: Any = None) -> tuple[TrainState, Metrics]:
        # Gradient of the mean loss over the whole batch
        key = jax.random.fold_in(jax.random.key(training.seed), state.step)
        if axis_name is not None:
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        (loss_sum, sums), gradients = _summed_gradients(loss, state, batch, key, training.accumulation)
        if axis_name is not None:
            loss_sum, sums, gradients = jax.lax.psum((loss_sum, sums, gradients), axis_name)
        if "router_loss" in sums:
            loss_sum = loss_sum - sums["router_loss"]  # reported without it, as evaluation measures it
        weight = sums["weight"]
        gradients = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-9).astype(g.dtype), gradients)
        squares = _squares(gradients)
        grad_norm = jnp.sqrt(squares.sum())

        # Update
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        weight_squares = _squares(params)

        # The update counts only if every number is finite and the loss is not above the limit
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm) & jnp.isfinite(weight_squares).all()
        usual = True if limit is None else loss_sum / jnp.maximum(weight, 1e-9) <= limit
        applied, skipped = _judged(training.nan_policy, state.skipped, finite, usual)
        params = _chosen(applied, params, state.params)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=_chosen(applied, opt_state, state.opt_state),
            ema=_chosen(applied, _averaged(training.ema_decay, state, params), state.ema),
            skipped=skipped,
            base=state.base,
        )
        metrics = {
            "loss_sum": loss_sum,
            **sums,
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.step - state.skipped),
            "skipped": skipped,
            "finite": finite,
            "first_bad": _first_bad(squares),
            "first_bad_weight": _first_bad(weight_squares),
        }
        return new_state, metrics

    return step


def _summed_loss(recipe: Recipe) -> Callable[..., tuple[jax.Array, Metrics]]:
    """A function (trained parameters, base, batch, key) -> the sum to minimize, and the sums that metrics need."""
    model = build_model(recipe)
    dropout = recipe.model.dropout_rate > 0 or recipe.model.attention.dropout_rate > 0

    def loss(trained, base, batch, key):
        params = model_params(recipe, trained, base)
        key = key if dropout else None
        loss_sum, weight, router_loss = training_loss(recipe.task, model, params, batch, recipe.training, key)
        if router_loss is None:
            return loss_sum, {"weight": weight}
        return loss_sum + router_loss, {"weight": weight, "router_loss": router_loss}

    return loss


def training_loss(
    task: str, model: nn.Module, params: Any, batch: Batch, training: TrainingConfig, dropout_key: PRNGKey | None
) -> tuple[Scalar, Scalar, Scalar | None]:
    """(loss sum, weight, router loss) of a batch with a tree of parameters, dropout when a key is given. The last is
    what routed layers add to the loss: a sum over tokens, as `cross_entropy`'s, in nats (Fedus et al. 2021, arXiv
    2101.03961, section 2.2); None without such layers. Rows of weight 0 add nothing.
    """
    kind, weights = TASKS[task], batch["weights"]
    variables, inputs = {"params": params}, kind.inputs(model.config, batch)
    options = {
        "deterministic": dropout_key is None,
        "rngs": None if dropout_key is None else {"dropout": dropout_key},
    }
    if kind.each_token:
        # Only the hidden states: the logits of all tokens at once may not fit into memory
        hidden, _, aux = model.apply(variables, **inputs, **options, method=type(model).run_stacks)
        loss_sum, weight = _token_loss(kind, model, params, hidden, batch, training)
    else:
        outputs, aux = model.apply(variables, **inputs, **options, method=type(model).with_aux)
        loss_sum, weight = kind.loss(outputs, batch, training)
    if not aux:
        return loss_sum, weight, None
    counts = (weights > 0).any(tuple(range(1, weights.ndim)))
    return loss_sum, weight, jnp.where(counts, sum(aux.values()), 0.0).sum()


def _head(model: nn.Module, params: Any) -> tuple[Callable[..., Outputs], Any]:
    """(parameters, hidden (B, T, D)) -> logits (B, T, V), and the parameters."""
    method = type(model).head
    return lambda params, hidden: model.apply({"params": params}, hidden, method=method), model.head_parameters(params)


def _token_loss(kind, model, params, hidden, batch, training):
    head, parameters = _head(model, params)
    tokens = training.loss_tokens
    if tokens is None:
        tokens = tokens_at_once(hidden, model.config.vocab_size)
    if not tokens:
        return kind.loss(head(parameters, hidden), batch, training)

    def part(parameters, hidden, targets, weights):
        return kind.loss(head(parameters, hidden), {"targets": targets, "weights": weights}, training)[0]

    loss_sum = loss_in_chunks(part, parameters, hidden, batch["targets"], batch["weights"], tokens)
    return loss_sum, batch["weights"].sum().astype(jnp.float32)


def _summed_gradients(
    loss: Callable[..., tuple[jax.Array, Metrics]], state: TrainState, batch: Batch, key: jax.Array, accumulation: int
) -> tuple[tuple[jax.Array, Metrics], Any]:
    """((loss sum, other sums), gradient of the loss sum), added over micro-batches of B / `accumulation` rows."""
    gradients = jax.value_and_grad(loss, has_aux=True)
    if accumulation == 1:
        return gradients(state.params, state.base, batch, key)

    def split_rows(array):
        """(B, ...) -> (A, B / A, ...), a micro-batch is every A-th row: rows spread over devices stay there."""
        return array.reshape(-1, accumulation, *array.shape[1:]).swapaxes(0, 1)

    def micro_batch(total, item):
        index, rows = item
        own = gradients(state.params, state.base, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, total, own), None

    parts = jnp.arange(accumulation), jax.tree.map(split_rows, dict(batch))
    first = jax.tree.map(lambda array: array[0], parts[1])
    sums = jax.eval_shape(loss, state.params, state.base, first, key)
    zero = jax.tree.map(jnp.zeros_like, (sums, state.params))
    return jax.lax.scan(micro_batch, zero, parts)[0]


def _judged(nan_policy: str, skipped: jax.Array, finite: jax.Array, usual: Any) -> tuple[jax.Array, jax.Array]:
    """Whether the update counts, and `TrainState.skipped` after it."""
    if nan_policy == "skip":
        applied = finite & usual
        return applied, skipped + (~applied).astype(jnp.int32)
    failed = ~finite | (skipped < 0)
    applied = ~failed & usual
    return applied, jnp.where(failed, -1, skipped + (~applied).astype(jnp.int32))


def _chosen(applied: jax.Array, new: Any, old: Any) -> Any:
    """The new tree if the update counts, otherwise the old one."""
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)


def _squares(tree: Any) -> jax.Array:
    """The sum of squares of each leaf, (leaves,), in float32."""
    return jnp.stack([jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(tree)])


def _first_bad(sums: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(sums).all(), -1, jnp.argmin(jnp.isfinite(sums)))


def _averaged(decay: float | None, state: TrainState, params: Any) -> Any:
    """decay * average + (1 - decay) * parameters; None without an average.

    The decay is smaller at first, so that the average forgets the initial parameters soon.
    """
    if state.ema is None:
        return None
    updates = (state.step - state.skipped).astype(jnp.float32)
    decay = jnp.minimum(decay, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda mean, new: (decay * mean + (1.0 - decay) * new).astype(mean.dtype), state.ema, params)


def make_eval_step(recipe: Recipe) -> EvalStep:
    """A pure function (params, batch) -> sums: `loss_sum` (without what `training` adds to it), `weight`, and the
    measures of the task, `correct` or `absolute_error`.
    """
    model = build_model(recipe)
    return lambda params, batch: dict(evaluation_sums(recipe.task, model, params, batch))


def evaluation_sums(task: str, model: nn.Module, params: Any, batch: Batch) -> Sums:
    """Sums over a batch: `loss_sum` (without what training adds to it), `weight`, and the task's measures."""
    kind = TASKS[task]

    def sums(outputs, batch):
        loss_sum, weight = kind.loss(outputs, batch, None)
        return {"loss_sum": loss_sum, "weight": weight, **kind.measures(outputs, batch)}

    variables = {"params": params}
    if not kind.each_token:
        return sums(kind.forward(model, variables, batch, deterministic=True, method=type(model).with_aux)[0], batch)
    hidden, *_ = kind.forward(model, variables, batch, deterministic=True, method=type(model).run_stacks)
    head, parameters = _head(model, params)
    tokens = tokens_at_once(hidden, model.config.vocab_size)
    if tokens is None:
        return sums(head(parameters, hidden), batch)

    def part(parameters, hidden, targets, weights):
        return sums(head(parameters, hidden), {"targets": targets, "weights": weights})

    return sum_in_chunks(part, parameters, hidden, batch["targets"], batch["weights"], tokens)


def check_finite(step: int, metrics: Mapping[str, np.ndarray], paths: Sequence[str], why: str = "") -> None:
    """Looks at the metrics (scalars) of a step, read from the device; `paths` are the `parameter_paths`, `why` is a
    sentence of what is known besides.

    Raises:
        NonFiniteError: they were not finite; names the step and the first parameter whose gradient or update was not.
    """
    if metrics["finite"]:
        return
    loss = float(metrics["loss_sum"]) / max(float(metrics["weight"]), 1e-9)
    gradient, weight = int(metrics["first_bad"]), int(metrics["first_bad_weight"])
    if gradient >= 0:
        where = f"the first bad gradient is that of {paths[gradient]}"
    else:
        where = "every gradient is finite" + (f", but not the update of {paths[weight]}" if weight >= 0 else "")
    raise NonFiniteError(
        f"step {step}: the loss is {loss:g}, {where}.{why and ' '}{why} The state was not updated. Lower "
        f"--optimizer.learning-rate, lengthen --optimizer.warmup-steps, or pass over such batches with "
        f"--training.nan-policy skip."
    )
