"""Tiny recipes and batches for several test files of training."""

import dataclasses
import functools
import os
import re

import chex
import jax
import numpy as np

from transformer.config import Execution, FeedForwardOptions, TransformerConfig
from transformer.data import NumberWords, TextFile, prepare
from transformer.nn._sharding import ParallelConfig
from transformer.training import LoggingConfig, OptimizerConfig, Recipe, TrainingConfig, to_json
from transformer.training._loop import train
from transformer.training._optimizers import make_optimizer
from transformer.training._recipe import load_recipe, with_vocabulary
from transformer.training._state import TrainState, abstract_state, initial_average, make_state
from transformer.training._step import compiled_eval_step, make_train_step
from transformer.training.tasks._evaluation import Evaluation
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._checkpoint import Checkpointer
from transformer.training.workdir._provenance import tokenizer_fingerprint
from transformer.training.workdir._runs import record_run

VOCABULARY = 13


def tiny_recipe(task="causal_lm", *, model=None, optimizer=None, **training):
    """Return a recipe of a model with about a thousand parameters. Keywords are passed to TrainingConfig."""
    data = {
        "causal_lm": TextFile(path="text.txt", sequence_length=7, batch_size=8),
        "seq2seq": NumberWords(batch_size=8),
    }[task]
    sizes = {"vocab_size": VOCABULARY, "d_model": 6, "num_heads": 3, "num_layers": 1, "feed_forward.d_ff": 5}
    return Recipe(
        name="tiny",
        model=TransformerConfig(**(sizes | (model or {}))),
        data=data,
        execution=Execution(scan=False),
        parallel=ParallelConfig(devices=1),
        optimizer=OptimizerConfig(**({"warmup_steps": 0, "schedule": "constant"} | (optimizer or {}))),
        training=TrainingConfig(**({"steps": 20} | training)),
    )


def evaluation_of(recipe, model, params, dataset, **options):
    """Return the evaluation of parameters as at the end of a run of this recipe."""
    step = compiled_eval_step(recipe)
    given = {"options": recipe.evaluation, "eval_step": step, "seed": 0} | options
    return Evaluation(model=model, params=params, dataset=dataset, **given)


def tiny_batch(task="causal_lm", rows=8, seed=0, padding=True):
    """Return a batch of random tokens whose rows have different numbers of targets."""
    random = np.random.default_rng(seed)
    batch = {
        "tokens": random.integers(3, VOCABULARY, (rows, 7)).astype(np.int32),
        "targets": random.integers(3, VOCABULARY, (rows, 7)).astype(np.int32),
        "weights": np.ones((rows, 7), np.float32),
    }
    if padding:
        for row in range(rows):
            batch["weights"][row, 7 - row % 5 :] = 0.0
    if task == "seq2seq":
        batch["source"] = random.integers(3, VOCABULARY, (rows, 5)).astype(np.int32)
        batch["source_lengths"] = (1 + np.arange(rows) % 5).astype(np.int32)
    return jax.device_put(batch)


@functools.cache
def initial_params(task, model):
    """Return initial parameters, compiled once per model config, for all other recipe options."""
    recipe = dataclasses.replace(tiny_recipe(task), model=model)
    return jax.jit(lambda: make_state(recipe).params)()


@functools.cache
def compiled_step(recipe):
    return jax.jit(make_train_step(recipe))


def batch_outputs(task, model, params, batch, dropout_key=None):
    """Return the outputs of a task's model for a batch, with dropout if a key is given."""
    rngs = None if dropout_key is None else {"dropout": dropout_key}
    return TASKS[task].forward(model, {"params": params}, batch, deterministic=dropout_key is None, rngs=rngs)


@functools.cache
def initial_state(recipe):
    """Return the initial state, whose parameters are those of `initial_params`."""
    params = initial_params(recipe.task, recipe.model)
    opt_state, ema = jax.jit(lambda tree: (make_optimizer(recipe).init(tree), initial_average(recipe, tree)))(params)
    return TrainState(
        step=jax.device_put(np.int32(0)),
        params=params,
        opt_state=opt_state,
        ema=ema,
        skipped=jax.device_put(np.int32(0)),
    )


def start(recipe):
    """Return the initial state and the compiled training step."""
    return initial_state(recipe), compiled_step(recipe)


def xla_flags(devices):
    """Return the XLA flags of the tests for a separate process with this number of devices."""
    return re.sub(r"(?<=device_count=)\d+", str(devices), os.environ["XLA_FLAGS"])


def change(recipe, **groups):
    """Return the recipe with fields of its groups replaced: change(recipe, training={"steps": 3})."""
    return dataclasses.replace(
        recipe, **{name: dataclasses.replace(getattr(recipe, name), **fields) for name, fields in groups.items()}
    )


def short_recipe(name, model, data, **groups):
    """Return a recipe for one device that compiles quickly and writes no event files; `groups` as in `change`."""
    recipe = Recipe(
        name=name,
        model=model,
        data=data,
        execution=Execution(scan=False),
        parallel=ParallelConfig(devices=1),
        logging=LoggingConfig(tensorboard=False, progress="lines"),
    )
    return change(recipe, **groups)


def six_steps(name, model, data, **groups):
    """Return a short recipe with six steps and averaged parameters; `groups` as in `change`."""
    recipe = short_recipe(
        name,
        model,
        data,
        optimizer={"warmup_steps": 0, "learning_rate": 1e-2, "schedule": "constant"},
        training={"steps": 6, "ema_decay": 0.9},
        evaluation={"every": 3},
        logging={"every": 2},
    )
    return change(recipe, **groups)


def few_number_words(folder, **fields):
    """Return a `NumberWords` config for numbers of two digits, prepared in `folder`; `fields` override the sizes."""
    sizes = {"max_digits": 2, "train_examples": 200, "test_examples": 10, "validation_examples": 5, "batch_size": 8}
    return NumberWords(data_dir=str(folder), **sizes | fields)


def record_drawn_run(recipe, workdir, steps, *, dtype=None, seed=3):
    """Write a workdir like that of a run, with a checkpoint of random parameters for each of `steps`.

    Nothing is trained, and little is compiled.
    """
    dataset = prepare(recipe.data)
    recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    shapes, random = abstract_state(recipe), np.random.default_rng(seed)

    def drawn(leaf):
        return random.normal(0, 1, leaf.shape).astype(dtype if dtype and leaf.dtype == np.float32 else leaf.dtype)

    workdir.mkdir()
    record_run(recipe, dataset, workdir)
    with Checkpointer(workdir, keep_last=len(steps)) as checkpoints:
        for number, step in enumerate(steps):
            data = {"fingerprint": dataset.fingerprint, "tokenizer": tokenizer_fingerprint(dataset.tokenizer)}
            checkpoints.save(step, jax.tree.map(drawn, shapes), data=data, recipe=to_json(recipe), metric=float(number))
    return workdir


def assert_equals_resumed_run(workdir, recipe, step, other):
    """Check that an uninterrupted run equals a resumed run bit for bit.

    `workdir` contains the uninterrupted run; the run in `other` is stopped at `step` and resumed.
    """
    train(change(recipe, training={"steps": step}), other)
    train(recipe, other)
    chex.assert_trees_all_equal(newest_state(other), newest_state(workdir))


def newest_state(workdir):
    """Return the training state of the newest checkpoint in a workdir."""
    with Checkpointer(workdir) as checkpoints:
        return jax.device_get(checkpoints.restore_newest(abstract_state(load_recipe(workdir))).state)


def text_recipe(folder, **groups):
    """Return a recipe of twelve steps with everything that a resumed run must restore: dropout, average, windows."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"line {number} of {number * number}, no more.\n" for number in range(90)))
    recipe = short_recipe(
        "tiny",
        TransformerConfig(
            d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5), dropout_rate=0.2
        ),
        TextFile(path=str(path), sequence_length=8, batch_size=4, eval_batch_size=16),
        optimizer={"warmup_steps": 3, "learning_rate": 1e-2, "decay_steps": 12},
        training={"steps": 12, "ema_decay": 0.9},
        evaluation={"every": 3, "batches": 3, "samples": 1, "sample_tokens": 5},
        checkpoint={"every": 4, "keep_last": 2},
        logging={"every": 5},
    )
    return change(recipe, **groups)
