"""The training step and the evaluation step, as pure functions, with stochastic rounding of 16-bit parameters.

The same function serves one device, gradient accumulation and any number of devices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from transformer.nn._axes import Array, DType, Float, PRNGKey
from transformer.nn._parameter_axes import axes_of
from transformer.nn._partitioning import table_gradients_in
from transformer.nn.kernels import portable
from transformer.nn.models._base import first_bad_parameter
from transformer.training._optimizers import AVERAGED, make_optimizer, make_schedule
from transformer.training._recipe import Recipe, build_model, build_teacher
from transformer.training._settings import TrainingConfig
from transformer.training._state import TrainState, in_dtypes_of, model_params, wide_dtype
from transformer.training.tasks._base import Options, output_head
from transformer.training.tasks._chunked_loss import loss_in_chunks, tokens_at_once
from transformer.training.tasks._distillation import TEACHER_HIDDEN, Teaching
from transformer.training.tasks._evaluation import EvalStep, NonFiniteError
from transformer.training.tasks._losses import Batch, Scalar
from transformer.training.tasks._table import TASKS

STREAM = 2**32 - 1
"""folded into the random key of a step; the keys of replicas are numbered from 0"""


def widened(tree: PyTree) -> PyTree:
    """Return the tree with its 16-bit floating-point leaves in float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, tree)


def rounded_like(old: PyTree, new: PyTree, key: PRNGKey) -> PyTree:
    """Round the leaves of `new` stochastically to the dtypes of the leaves of `old`, where these have 16 bits.

    Rounded to nearest, an update of less than half the distance between two numbers has no effect: a scale of 1.0 in
    bfloat16, whose neighbors are 0.996 and 1.008, never moves with a learning rate of 1e-4. Rounded up with the
    probability of the remainder, updates are right on average (Gupta et al. 2015, arXiv 1502.02551, section 3; for
    training in bfloat16, Zamirai et al. 2020, arXiv 2010.06192). The result is a function of the key, so a resumed run
    rounds as an uninterrupted one.
    """
    leaves, structure = jax.tree.flatten(old)
    values = structure.flatten_up_to(new)
    pairs = enumerate(zip(leaves, values, strict=True))
    return structure.unflatten(
        _rounded(value, leaf.dtype, jax.random.fold_in(key, i)) if _is_narrow(leaf) and not _is_narrow(value) else value
        for i, (leaf, value) in pairs
    )


def _is_narrow(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize == 2


def _rounded(value: Float[Array, "..."], dtype: DType, key: PRNGKey) -> Float[Array, "..."]:
    """Round float32 values to one of their two neighbors in `dtype`, with their exact values as expectation."""
    nearest = value.astype(dtype)
    rest = value - nearest.astype(jnp.float32)
    away = jnp.where(rest > 0, jnp.inf, -jnp.inf).astype(dtype)
    other = jnp.nextafter(nearest, away)
    # P(other) = rest / (other - nearest), from 0 to 1/2, gives the mean nearest + rest = value.
    share = rest / (other.astype(jnp.float32) - nearest.astype(jnp.float32))  # NaN stays NaN, and is not chosen
    return jnp.where(jax.random.uniform(key, value.shape) < share, other, nearest)


Metrics = dict[str, jax.Array]
"""scalars, by name"""
TrainStep = Callable[..., tuple[TrainState, Metrics]]
"""result of `make_train_step`: a function of a state, a batch and an optional limit, ()"""


def make_train_step(recipe: Recipe, axis_name: str | None = None) -> TrainStep:
    """Return a pure function (state, batch, limit) -> (state, metrics), for `jax.jit` or `jax.pmap` over `axis_name`.

    The loss is summed over micro-batches and over `axis_name`, and divided once by the weight of the whole batch. So
    every split of the batch gives the same loss and gradient, up to rounding (and dropout). Rows of weight 0 have no
    effect.

    A step does not change the parameters, the optimizer state and the average if its loss, gradient or new parameters
    are not finite; with nan_policy "stop", neither does any later step. The same holds for a single step whose mean
    loss is above `limit` (in the unit of the loss): such a batch is skipped as a loss spike (Chowdhery et al. 2022,
    arXiv 2204.02311, section 5.1).

    The metrics are scalars: `loss_sum`, `weight`, `grad_norm` (before clipping), `learning_rate`, `skipped` (total so
    far), and `finite`, `first_bad` and `first_bad_weight` for `check_finite`. With MoE layers there is also
    `router_loss`, a sum in nats, which is minimized together with `loss_sum` and not part of it.
    """
    training, optimizer, schedule = recipe.training, make_optimizer(recipe), make_schedule(recipe)
    loss = _summed_loss(recipe)

    def step(state: TrainState, batch: Batch, limit: jax.Array | None = None) -> tuple[TrainState, Metrics]:
        # Gradient of the mean loss over the whole batch. The dropout key is a function of the seed and the step alone,
        # so that a resumed run draws the same dropout masks as an uninterrupted one.
        key = jax.random.fold_in(jax.random.key(training.seed), state.step)
        rounding = jax.random.split(jax.random.fold_in(key, STREAM))  # the same for all replicas
        if axis_name is not None:  # otherwise all replicas would apply the same dropout mask to different rows
            key = jax.random.fold_in(key, jax.lax.axis_index(axis_name))
        (loss_sum, sums), gradients = _summed_gradients(loss, state, batch, key, training.accumulation)
        if axis_name is not None:  # pmap: add the sums of all replicas; with jit, XLA inserts the communication
            loss_sum, sums = jax.lax.psum((loss_sum, sums), axis_name)
            gradients = _over_replicas(gradients, axis_name, training.embedding_gradient_dtype)
        if "router_loss" in sums:
            loss_sum = loss_sum - sums["router_loss"]  # as reported, it is comparable with the eval loss
        weight = sums["weight"]
        # The division comes after all sums: the mean of the micro-batches' means would weight each token by the
        # number of padding tokens in its micro-batch. max() keeps the gradient 0 for a batch of weight 0.
        gradients = jax.tree.map(lambda g: g / jnp.maximum(weight, 1e-9).astype(g.dtype), gradients)
        squares = _squares(gradients)  # (leaves,)
        grad_norm = jnp.sqrt(squares.sum())  # global norm, over all parameters

        # Update
        def mean_loss(params):  # for optimizers that differentiate the loss again
            # Of the first micro-batch: the whole batch may not fit into memory, and the estimate is noisy anyway.
            rows = jax.tree.map(lambda array: array[:: training.accumulation], dict(batch))
            total, sums = loss(params, state, rows, key)
            return total / jnp.maximum(sums["weight"], 1e-9)

        # In float32, also if parameters are stored in 16 bits, where most updates are smaller than half the distance of
        # two numbers.
        gradients, wide, opt_state = map(widened, (gradients, state.params, state.opt_state))
        updates, opt_state = optimizer.update(gradients, opt_state, wide, obj_fn=mean_loss)
        params = TASKS[recipe.task].limited(recipe.model, optax.apply_updates(wide, updates))
        params = rounded_like(state.params, params, rounding[0])
        opt_state = rounded_like(state.opt_state, opt_state, rounding[1])
        weight_squares = _squares(params)

        # The update is applied only if every value is finite and the loss is not above the limit. A sum of squares is
        # finite only if every entry is, so these small sums replace a check of each entry on the host. The new
        # parameters are checked too: an update can overflow although its gradient is finite.
        finite = jnp.isfinite(loss_sum) & jnp.isfinite(grad_norm) & jnp.isfinite(weight_squares).all()
        usual = True if limit is None else loss_sum / jnp.maximum(weight, 1e-9) <= limit
        applied, skipped = _judged(training.nan_policy, state.skipped, finite, usual)
        params = _chosen(applied, params, state.params)
        new_state = TrainState(
            step=state.step + 1,
            params=params,
            opt_state=_chosen(applied, opt_state, state.opt_state),
            ema=_chosen(applied, _averaged(recipe, state, params, opt_state), state.ema),
            skipped=skipped,
            base=state.base,
            teacher=state.teacher,
        )
        metrics = {
            "loss_sum": loss_sum,
            **sums,
            "grad_norm": grad_norm,
            "learning_rate": schedule(state.step - state.skipped),  # the optimizer counts applied updates only
            "skipped": skipped,
            "finite": finite,
            "first_bad": _first_bad(squares),
            "first_bad_weight": _first_bad(weight_squares),
        }
        return new_state, metrics

    return step


def _summed_loss(recipe: Recipe) -> Callable[..., tuple[jax.Array, Metrics]]:
    """Return a function (trained, state, batch, key) -> (sum to minimize, other sums); it reads frozen parameters."""
    model, kind = build_model(recipe), TASKS[recipe.task]
    options = kind.options(recipe)
    dropout = recipe.model.dropout_rate > 0 or recipe.model.attention.dropout_rate > 0
    drops_tokens = any(one.moe is not None and one.moe.capacity_factor is not None for one in recipe.model.kinds)

    teacher = None if recipe.distill is None else build_teacher(recipe)

    def loss(trained, state, batch, key):
        with table_gradients_in(recipe.training.embedding_gradient_dtype):
            return summed(trained, state, batch, key)

    def summed(trained, state, batch, key):
        params = model_params(recipe, trained, state.base)
        key, others = key if dropout or drops_tokens else None, {}
        if options is not None:
            loss_sum, weight, others, router_loss = kind.compared(
                model, params, state.base, batch, options, recipe.training.loss_tokens, **_dropped(key)
            )
        else:
            given = None if teacher is None else Teaching(teacher, state.teacher, recipe.distill)
            loss_sum, weight, router_loss = training_loss(
                recipe.task, model, params, batch, recipe.training, key, given
            )
        sums = {"weight": weight, **others}
        if router_loss is None:
            return loss_sum, sums
        return loss_sum + router_loss, sums | {"router_loss": router_loss}

    return loss


def _dropped(key: PRNGKey | None) -> dict[str, Any]:
    """Return the arguments of a model for training with this key: dropout, and a capacity of experts; None: neither."""
    return {"deterministic": key is None, "rngs": None if key is None else {"dropout": key}}


def training_loss(
    task: str,
    model: nn.Module,
    params: PyTree,
    batch: Batch,
    training: TrainingConfig,
    dropout_key: PRNGKey | None,
    teaching: Teaching | None = None,
) -> tuple[Scalar, Scalar, Scalar | None]:
    """Compute (loss sum, weight, router loss) of a batch (B, ...); rows of weight 0 add nothing.

    Without a `dropout_key` there is no dropout, and no capacity of experts. With `teaching`, the model learns the
    predictions of a teacher too. The router loss is the load-balancing term of MoE layers (Fedus et al. 2021, arXiv
    2101.03961, section 2.2), in nats and summed over tokens like the loss; None without MoE layers.
    """
    kind, weights = TASKS[task], batch["weights"]
    variables, inputs = {"params": params}, kind.inputs(model.config, batch)
    options = _dropped(dropout_key)
    if kind.each_token:
        # Compute hidden states (B, T, D) only: the logits (B, T, V) of all tokens together may not fit into memory
        hidden, _, aux = model.apply(variables, **inputs, **options, method=type(model).run_stacks)
        loss_sum, weight = _token_loss(kind, model, params, hidden, batch, training, teaching)
    else:
        outputs, aux = model.apply(variables, **inputs, **options, method=type(model).with_aux)
        loss_sum, weight = kind.loss(outputs, batch, training)
    if not aux:
        return loss_sum, weight, None
    counts = (weights > 0).any(tuple(range(1, weights.ndim)))  # (B,), False for rows that only fill up the batch
    # aux has one term per row, (B,), for each kind of router loss. `where` removes those of rows without weight.
    return loss_sum, weight, jnp.where(counts, sum(aux.values()), 0.0).sum()


def _token_loss(kind, model, params, hidden, batch, training, teaching):
    """Compute (loss sum, weight) from hidden states (B, T, D), with the logits of some tokens at a time."""
    head, parameters = output_head(model, params)
    if teaching is not None:
        batch = teaching.with_hidden(kind, batch)
    tokens = training.loss_tokens
    if tokens is None:
        tokens = tokens_at_once(hidden, model.config.vocab_size)

    def whole(logits, batch):
        hard = kind.loss(logits, batch, training)
        return hard if teaching is None else (teaching.loss(hard[0], logits, batch), hard[1])

    if not tokens and training.embedding_gradient_dtype != "float32":
        tokens = hidden.shape[0] * hidden.shape[1]  # a single chunk, which sums the gradient over devices in this dtype
    if not tokens:
        return whole(head(parameters, hidden), batch)

    def part(parameters, hidden, targets, weights):
        return whole(head(parameters, hidden), {**targets, "weights": weights})[0]

    targets = {name: batch[name] for name in ("targets", TEACHER_HIDDEN) if name in batch}
    given = parameters, hidden, targets, batch["weights"], tokens
    loss_sum = loss_in_chunks(part, *given, training.embedding_gradient_dtype)
    return loss_sum, batch["weights"].sum().astype(jnp.float32)


def _summed_gradients(
    loss: Callable[..., tuple[jax.Array, Metrics]], state: TrainState, batch: Batch, key: jax.Array, accumulation: int
) -> tuple[tuple[jax.Array, Metrics], PyTree]:
    """Compute ((loss sum, other sums), gradient of the loss sum), added up over `accumulation` micro-batches."""
    gradients = jax.value_and_grad(loss, has_aux=True)
    if accumulation == 1:
        return gradients(state.params, state, batch, key)

    def split_rows(array):
        """(B, ...) -> (A, B / A, ...), where micro-batch i has rows i, i + A, i + 2 A, ...

        A plain reshape to (A, B / A, ...) would put consecutive rows, which are stored on the same device, into one
        micro-batch: it would need communication and leave the other devices idle.
        """
        return array.reshape(-1, accumulation, *array.shape[1:]).swapaxes(0, 1)

    def micro_batch(total, item):
        index, rows = item
        own = gradients(state.params, state, rows, jax.random.fold_in(key, index))  # new dropout masks
        return jax.tree.map(jnp.add, total, own), None

    # A scan and not a Python loop: XLA then reuses the memory of one micro-batch's activations for the next.
    parts = jnp.arange(accumulation), jax.tree.map(split_rows, dict(batch))
    first = jax.tree.map(lambda array: array[0], parts[1])
    sums = jax.eval_shape(loss, state.params, state, first, key)  # shapes of (loss sum, other sums)
    # Gradients are added in at least float32: in bfloat16, which has 8 significant bits, 256 + 1 is 256, so that the
    # later of many micro-batches would change the sum too little, or not at all.
    zero = (
        jax.tree.map(jnp.zeros_like, sums),
        jax.tree.map(lambda leaf: jnp.zeros_like(leaf, wide_dtype(leaf.dtype)), state.params),
    )
    sums, total = jax.lax.scan(micro_batch, zero, parts)[0]
    return sums, in_dtypes_of(state.params, total)


def _over_replicas(gradients: PyTree, axis_name: str, vocabulary_dtype: str) -> PyTree:
    """Sum gradients over the replicas of pmap, those of matrices with an axis V in `vocabulary_dtype`."""
    if vocabulary_dtype == "float32":
        return jax.lax.psum(gradients, axis_name)

    def over(path, gradient):
        axes = axes_of(jax.tree_util.keystr(path, simple=True, separator="/"), gradient.ndim)
        is_vocabulary = gradient.ndim == 2 and axes is not None and "vocab" in axes.names
        dtype = vocabulary_dtype if is_vocabulary else gradient.dtype
        return jax.lax.psum(gradient.astype(dtype), axis_name).astype(gradient.dtype)

    return jax.tree_util.tree_map_with_path(over, gradients)


def _judged(
    nan_policy: str, skipped: jax.Array, finite: jax.Array, usual: jax.Array | bool
) -> tuple[jax.Array, jax.Array]:
    """Return whether to apply the update, and the new value of `TrainState.skipped`, all of shape ()."""
    if nan_policy == "skip":
        applied = finite & usual
        return applied, skipped + (~applied).astype(jnp.int32)
    # -1 is permanent: the host reads the metrics of a step only after it has dispatched the next one, and that step
    # must not change the state either.
    failed = ~finite | (skipped < 0)
    applied = ~failed & usual
    return applied, jnp.where(failed, -1, skipped + (~applied).astype(jnp.int32))


def _chosen(applied: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Select the new tree if the update is applied, else the old one, with `where`: NaN times 0 would still be NaN."""
    return jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, old)


def _squares(tree: PyTree) -> jax.Array:
    """Compute the sum of squares of each leaf, (leaves,), in float32: a long sum in bfloat16 would lose most terms."""
    return jnp.stack([jnp.square(leaf.astype(jnp.float32)).sum() for leaf in jax.tree.leaves(tree)])


def _first_bad(sums: jax.Array) -> jax.Array:
    """Return the index of the first non-finite sum, -1 if all are finite; argmin finds the first False."""
    return jnp.where(jnp.isfinite(sums).all(), -1, jnp.argmin(jnp.isfinite(sums)))


def _averaged(recipe: Recipe, state: TrainState, params: PyTree, opt_state: PyTree) -> PyTree:
    """Compute the new average of the parameters; None without one.

    It is that of an optimizer in `AVERAGED`, or an exponential moving average, decay * average + (1 - decay) *
    parameters. Its decay starts at 1 / 10 and rises to `training.ema_decay`, so that the average quickly forgets the
    initial parameters.
    """
    if recipe.optimizer.name in AVERAGED:
        return optax.contrib.schedule_free_eval_params(opt_state, params)
    if state.ema is None:
        return None
    updates = (state.step - state.skipped).astype(jnp.float32)  # number n of applied updates
    # min(decay, (1 + n) / (10 + n)). In float32, and rounded to the dtype of the average only at the end.
    decay = jnp.minimum(recipe.training.ema_decay, (1.0 + updates) / (10.0 + updates))
    return jax.tree.map(lambda mean, new: (decay * mean + (1.0 - decay) * new).astype(mean.dtype), state.ema, params)


def make_eval_step(recipe: Recipe) -> EvalStep:
    """Return a pure function (params, batch, reference) -> `Task.sums` of the batch."""
    model, task = build_model(recipe), TASKS[recipe.task]
    options = task.options(recipe)

    def step(params, batch, reference=None):
        return dict(task.sums(model, params, batch, reference, options))

    return step


def compiled_eval_step(recipe: Recipe, reference: PyTree = None) -> EvalStep:
    """Return a jitted `make_eval_step` without a mesh, compiled once for each task, model and batch shape."""
    options, model = TASKS[recipe.task].options(recipe), build_model(recipe, portable(recipe.execution))
    return functools.partial(_eval_step, recipe.task, model, reference=reference, options=options)


@functools.partial(jax.jit, static_argnames=("task", "model", "options"))
def _eval_step(
    task: str, model: nn.Module, params: PyTree, batch: Batch, reference: PyTree, options: Options
) -> Metrics:
    return dict(TASKS[task].sums(model, params, batch, reference, options))


def check_finite(step: int, metrics: Mapping[str, np.ndarray], paths: Sequence[str], why: str = "") -> None:
    """Raise NonFiniteError if loss, gradients or parameters of a step are not finite, with `why` as a further sentence.

    It names the first parameter whose gradient or update is not finite. `metrics` are on the host, `paths` are those of
    `parameter_paths`.
    """
    if metrics["finite"]:
        return
    loss = float(metrics["loss_sum"]) / max(float(metrics["weight"]), 1e-9)
    gradient, weight = int(metrics["first_bad"]), int(metrics["first_bad_weight"])
    if gradient >= 0:
        where = f"the first non-finite gradient is that of {paths[gradient]}"
    else:
        where = "all gradients are finite" + (f", but the update of {paths[weight]} is not" if weight >= 0 else "")
    raise NonFiniteError(
        f"step {step}: the loss is {loss:g}, and {where}.{why and ' '}{why} The state was not updated. Lower "
        f"--optimizer.learning-rate, raise --optimizer.warmup-steps, or skip such batches with "
        f"--training.nan-policy skip."
    )


def why_not_finite(recipe: Recipe, model: nn.Module, params: PyTree, batch: Batch) -> str:
    """Explain in one sentence why the loss of a batch is not finite; "" with several processes, which lack rows.

    The sentence names the first non-finite parameter. If all parameters are finite, it names the first row and position
    whose logits (or forecasts) are not finite without dropout. The model runs row by row, so that only the logits of
    one row, (1, T, V), are in memory.
    """
    if jax.process_count() > 1:
        return ""
    if (path := first_bad_parameter(params)) is not None:
        return f"The parameter {path} contains NaN or infinity."
    model = model.clone(execution=portable(model.execution))
    task = TASKS[recipe.task]

    @jax.jit
    def finite(params, row):
        outputs = task.forward(model, {"params": params}, row, deterministic=True, rngs=None)
        return jnp.isfinite(outputs).all(-1).all(0)  # (T,), of both responses of a pair; () for a classifier

    for row in range(len(batch["weights"])):
        bad = np.argwhere(~np.asarray(finite(params, {name: array[row : row + 1] for name, array in batch.items()})))
        if len(bad):
            place = f" at position {bad[0][0]}" if bad.shape[1] else ""
            return (
                f"All parameters are finite, but the {task.outputs} of row {row} are not{place}: a value overflowed "
                f"in {model.config.dtype}."
            )
    return f"All parameters are finite, and so are the {task.outputs} of the batch without dropout."
