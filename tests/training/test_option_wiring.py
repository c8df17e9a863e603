"""Options of training reach the place where they act, also in combination: dropout, averages, skipped steps."""

import dataclasses
from types import SimpleNamespace

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from training_recipes import VOCABULARY, short_recipe, start, tiny_batch, tiny_recipe

from transformer.config import Execution, FeedForwardOptions, TransformerConfig
from transformer.data import NumberWords, Preferences
from transformer.nn.models._dual import PairLogits
from transformer.nn.quantization._adapted import NF4, Adapted
from transformer.nn.quantization._int8 import Int8
from transformer.training import DPO, GRPO, CheckpointConfig, EvaluationConfig, LoRA, OptimizerConfig, TrainingConfig
from transformer.training import _loop as loop
from transformer.training._optimizers import make_optimizer, make_schedule
from transformer.training._recipe import build_model
from transformer.training._settings import OptimizerName
from transformer.training._state import TrainState, make_state, merged_params, model_params
from transformer.training._step import make_eval_step, make_train_step
from transformer.training.tasks import _texts as samples
from transformer.training.tasks import _texts as texts
from transformer.training.tasks._evaluation import Evaluation
from transformer.training.tasks._losses import cross_entropy, matched_by_sigmoid, matched_by_softmax
from transformer.training.tasks._policy_gradient import policy_loss
from transformer.training.tasks._preference import PreferenceLoss
from transformer.training.tasks._table import TASKS

LENGTH = 7


def test_the_average_and_the_schedule_count_applied_steps():
    """After 9 steps, of which 6 were skipped, the average has decay (1 + 3) / (10 + 3), and the schedule is at 3."""
    recipe = tiny_recipe(nan_policy="skip", ema_decay=0.9)
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, warmup_steps=20))
    state, step = start(recipe)
    before = jax.tree.map(lambda leaf: np.asarray(leaf) + 1.0, state.params)
    state = state.replace(step=np.int32(9), skipped=np.int32(6), ema=before)
    after, metrics = step(state, tiny_batch())
    decay = 4 / 13
    for mean, old, new in zip(*map(jax.tree.leaves, (after.ema, before, after.params)), strict=True):
        np.testing.assert_allclose(mean, decay * old + (1 - decay) * np.asarray(new), rtol=1e-5, atol=1e-6)
    assert float(metrics["learning_rate"]) == pytest.approx(float(jax.jit(make_schedule(recipe))(3)), rel=1e-6)


def test_the_reference_of_dpo_has_no_dropout():
    """The same parameters with dropout are another model: its scores are not 0, and differ between keys."""
    model = TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=6,
        num_heads=3,
        num_layers=1,
        feed_forward=FeedForwardOptions(d_ff=5),
        dropout_rate=0.5,
    )
    recipe = dataclasses.replace(short_recipe("dpo", model, Preferences(path="none", max_length=LENGTH)), dpo=DPO())
    random = np.random.default_rng(0)
    ids = random.integers(3, VOCABULARY, (4, 2, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": np.ones(ids[..., 1:].shape, np.float32)}
    batch = jax.device_put(batch)
    params, built = jax.jit(lambda: make_state(recipe).params)(), build_model(recipe)

    @jax.jit
    def rewards(key):
        given = {"deterministic": key is None, "rngs": None if key is None else {"dropout": key}}
        _, _, sums, _ = TASKS["dpo"].compared(built, params, params, batch, recipe.dpo, **given)
        return sums["chosen_reward"]

    assert float(rewards(None)) == 0.0
    first, second = (float(rewards(jax.random.key(seed))) for seed in (0, 1))
    assert abs(first) > 1e-3
    assert abs(first - second) > 1e-3


# The optimizer


EVERYWHERE = {"learning_rate": 0.02, "weight_decay": 0.3, "decay_embeddings": True, "clip_norm": None}
ADAM = {"beta1": 0.5, "beta2": 0.6, "epsilon": 0.3}
READ = {
    "adamw": ADAM,
    "adafactor": {},
    "lion": {"beta1": 0.5, "beta2": 0.6},
    "muon": ADAM | {"momentum": 0.5},
    "schedule_free_adamw": ADAM,
    "sophia": ADAM,
}
"""fields that each optimizer reads besides `EVERYWHERE`, with another value"""


def three_updates(**optimizer):
    """Return the parameters after three updates of a matrix, an embedding table and a scale."""
    recipe = tiny_recipe(optimizer={"learning_rate": 0.1})
    recipe = dataclasses.replace(recipe, execution=Execution(attention="reference"))  # which sophia needs
    recipe = dataclasses.replace(recipe, optimizer=dataclasses.replace(recipe.optimizer, **optimizer))
    random = np.random.default_rng(0)
    shapes = {"decoder/up/kernel": (6, 5), "embedding/embedding": (7, 6), "final_norm/scale": (6,)}
    flat = {tuple(path.split("/")): random.normal(size=shape).astype(np.float32) for path, shape in shapes.items()}
    params, optimizer = flax.traverse_util.unflatten_dict(flat), make_optimizer(recipe)

    def loss(params):
        return sum(jnp.square(leaf + jnp.sin(3 * leaf)).sum() for leaf in jax.tree.leaves(params))

    def update(carry, factor):
        params, state = carry
        gradients = jax.tree.map(lambda leaf: factor * leaf, jax.grad(loss)(params))
        updates, state = optimizer.update(gradients, state, params, obj_fn=loss)
        return (optax.apply_updates(params, updates), state), None

    @jax.jit
    def run(params):
        factors = jnp.array([1.0, 10.0, 0.1])  # the direction of some optimizers does not depend on a common factor
        return jax.lax.scan(update, (params, optimizer.init(params)), factors)[0][0]

    return jax.tree.leaves(jax.device_get(run(params)))


@pytest.mark.programs(16, reason="one program for each field of the optimizer")
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "sophia")) for name in READ])
def test_an_optimizer_reads_only_its_fields(name):
    assert set(READ) == set(OptimizerName.__args__)
    plain = {"name": name, "schedule": "constant"}
    before = three_updates(**plain)
    fields = EVERYWHERE | ADAM | {"momentum": 0.5}
    schedule = {"name", "schedule", "warmup_steps", "decay_steps", "final_fraction", "decay_fraction"}
    assert set(fields) | schedule == {field.name for field in dataclasses.fields(OptimizerConfig)}
    for field, value in fields.items():
        after = three_updates(**plain, **{field: value})
        changed = any(np.abs(a - b).max() > 1e-6 for a, b in zip(before, after, strict=True))
        assert changed == (field in EVERYWHERE | READ[name]), field


SCHEDULES = {
    "constant": {"learning_rate", "warmup_steps"},
    "cosine": {"learning_rate", "warmup_steps", "decay_steps", "final_fraction", "training.steps"},
    "wsd": {"learning_rate", "warmup_steps", "decay_steps", "final_fraction", "decay_fraction", "training.steps"},
    "rsqrt": {"learning_rate", "warmup_steps"},
    "noam": {"learning_rate", "warmup_steps", "model.d_model"},
}
"""fields that each schedule reads"""


@pytest.mark.programs(12, reason="one program for each field of the schedule")
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_reads_only_its_fields(name):
    plain = {"schedule": name, "warmup_steps": 10}
    changes = {
        "learning_rate": 0.5,
        "warmup_steps": 20,
        "decay_steps": 60,
        "final_fraction": 0.4,
        "decay_fraction": 0.5,
    }
    recipes = {field: tiny_recipe(optimizer=plain | {field: value}, steps=80) for field, value in changes.items()}
    recipes["training.steps"] = tiny_recipe(optimizer=plain, steps=70)
    recipes["model.d_model"] = tiny_recipe(model={"d_model": 12}, optimizer=plain, steps=80)
    before = rates(tiny_recipe(optimizer=plain, steps=80))
    found = {field for field, recipe in recipes.items() if np.abs(rates(recipe) - before).max() > 1e-9}
    assert found == SCHEDULES[name]


def rates(recipe):
    return np.asarray(jax.jit(lambda: jax.vmap(make_schedule(recipe))(jnp.arange(80)))())


# Preferences and rewards


def preference_recipe(**options):
    model = TransformerConfig(
        vocab_size=VOCABULARY,
        d_model=6,
        num_heads=3,
        num_layers=1,
        feed_forward=FeedForwardOptions(d_ff=5),
        dropout_rate=0.0,
    )
    data = Preferences(path="none", max_length=LENGTH)
    return dataclasses.replace(short_recipe("dpo", model, data), dpo=DPO(**options))


@pytest.mark.programs(8, reason="the loss of evaluation for two recipes, one of training, and the states")
def test_options_of_preferences_reach_training_and_evaluation():
    random = np.random.default_rng(0)
    ids = random.integers(3, VOCABULARY, (4, 2, LENGTH + 1)).astype(np.int32)
    batch = {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": np.ones(ids[..., 1:].shape, np.float32)}
    batch = jax.device_put(batch)
    base = jax.jit(lambda: make_state(preference_recipe()).params)()
    params = jax.tree.map(
        lambda leaf: np.asarray(leaf) + 0.1 * np.cos(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape), base
    )
    options = {"beta": 0.7, "label_smoothing": 0.2}
    assert set(options) | {"loss"} == {field.name for field in dataclasses.fields(DPO)}
    for name in PreferenceLoss.__args__:
        recipe = preference_recipe(loss=name)
        assert TASKS["dpo"].options(recipe) is recipe.dpo
    losses = []
    for recipe in (preference_recipe(), preference_recipe(**options)):
        losses.append(float(jax.jit(make_eval_step(recipe))(params, batch, base)["loss_sum"]))
    _, trained = jax.jit(make_train_step(recipe))(initial_state_of(recipe, params, base), batch)
    assert float(trained["loss_sum"]) == pytest.approx(losses[1], rel=1e-5)
    assert abs(losses[0] - losses[1]) > 1e-2


def initial_state_of(recipe, params, base):
    opt_state = jax.jit(make_optimizer(recipe).init)(params)
    return TrainState(step=np.int32(0), params=params, opt_state=opt_state, ema=None, skipped=np.int32(0), base=base)


@pytest.mark.programs(12, reason="the loss for each option")
def test_each_option_of_the_policy_loss_changes_it():
    random = np.random.default_rng(0)
    own, old, reference = (-np.abs(random.normal(size=(6, 5))).astype(np.float32) for _ in range(3))
    advantages, weights = random.normal(size=6).astype(np.float32), (random.random((6, 5)) < 0.7).astype(np.float32)
    weights[:, 0] = 1.0
    batch = {"old": old, "reference": reference, "advantages": advantages, "weights": weights}

    def loss(**options):
        given = GRPO(rewards=("a:b",), **options)
        total, weight, _ = jax.jit(lambda own, batch: policy_loss(own, batch, given))(own, batch)
        return float(total) / float(weight)

    plain = loss()
    changes = {"beta": 0.0, "clip": 0.05, "clip_high": 1.0, "normalization": "dapo"}
    found = {name: loss(**{name: value}) for name, value in changes.items()}
    found["max_new_tokens"] = loss(normalization="dr_grpo", max_new_tokens=9)
    found["dr_grpo"] = loss(normalization="dr_grpo")
    assert len({round(value, 5) for value in (plain, *found.values())}) == 1 + len(found)


# Evaluation and checkpoints


def test_evaluation_options_reach_generation_and_beam_search(monkeypatch):
    calls = {}

    def recorder(name, result):
        return lambda *given, **named: (calls.update({name: (given, named)}), result)[1]

    monkeypatch.setattr(samples, "generate", recorder("generate", [[3, 3, 3]]))
    monkeypatch.setattr(texts, "translations", recorder("translations", None))
    options = EvaluationConfig(
        sample_tokens=3, temperature=0.3, beam_size=2, beam_alpha=1.5, exact_match_examples=17, samples=1
    )
    tokenizer = SimpleNamespace(decode=str, encode_source=lambda text: [4])
    openings = [("question", [5, 6])]
    data = {"config": tiny_recipe().data, "prompts": lambda: ["prompt"], "openings": lambda wanted: openings}
    dataset = SimpleNamespace(tokenizer=tokenizer, end_ids=[1], splits=("test",), **data)

    def evaluation(options):
        return Evaluation(model=None, params=None, dataset=dataset, options=options, eval_step=None, seed=0)

    for number in (1, 5):  # a piece has three tokens, half a row
        text = TASKS["causal_lm"].samples(evaluation(dataclasses.replace(options, sample_tokens=number)))
        assert text == str([4, *[3] * number])
    assert calls["generate"][1]["sampling"].temperature == 0.3
    TASKS["sft"].samples(evaluation(options))
    assert (calls["generate"][1]["max_new_tokens"], calls["generate"][1]["sampling"].temperature) == (3, 0.3)
    dataset.config = NumberWords()
    TASKS["seq2seq"].report(evaluation(options), None)
    wanted, beam = calls["translations"][0][2:]
    assert (wanted, beam.size, beam.alpha) == (17, 2, 1.5)
    TASKS["seq2seq"].report(evaluation(dataclasses.replace(options, beam_size=1)), None)
    assert calls["translations"][0][3] is None


def test_a_run_keeps_the_number_of_checkpoints_in_its_recipe(tmp_path, monkeypatch):
    given = {}
    monkeypatch.setattr(loop, "Checkpointer", lambda workdir, **options: given.update(options))
    recipe = dataclasses.replace(tiny_recipe(), checkpoint=CheckpointConfig(keep_last=5, keep_best=3))
    loop._checkpointer(recipe, tmp_path)
    assert given == {"keep_last": 5, "keep_best": 3}


# Adapters


def adapted_recipe(base=None, dtype="bfloat16", **options):
    model = {"d_model": 12, "dtype": dtype, "parameters.dtype": "float32"}
    return dataclasses.replace(tiny_recipe(model=model), lora=LoRA(base=base, **options))


@pytest.mark.parametrize(
    ("options", "scale"),
    [
        ({}, 2.0),
        ({"rank": 4, "alpha": 3.0}, 0.75),
        ({"rank": 4, "alpha": 3.0, "rslora": True}, 1.5),
        ({"rank": 4, "alpha": 3.0, "rslora": True, "dora": True, "targets": ("up", "query")}, 1.5),
    ],
)
def test_rank_scale_and_targets_reach_the_kernels(options, scale):
    """By shapes alone, which computes nothing."""
    recipe = adapted_recipe(**options)
    state = jax.eval_shape(lambda: make_state(recipe))
    params = jax.eval_shape(lambda state: model_params(recipe, state.params, state.base), state)
    flat = jax.tree.flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, Adapted))[0]
    adapted = {path[-2].key: leaf for path, leaf in flat if isinstance(leaf, Adapted)}
    assert set(adapted) == set(recipe.lora.targets)
    for kernel in adapted.values():
        assert kernel.scale == scale
        assert kernel.a.shape[-1] == kernel.b.shape[-2] == recipe.lora.rank
        assert (kernel.magnitude is not None) == recipe.lora.dora


@pytest.mark.parametrize(("base", "kind"), [("int8", Int8), ("nf4", NF4), ("bfloat16", None), ("float32", None)])
def test_the_frozen_base_has_the_format_of_the_recipe(base, kind):
    """Kernels in `lora.base`, tables in the dtype of the computation; merged parameters in that of the parameters."""
    recipe = adapted_recipe(base, "bfloat16")
    state = jax.eval_shape(lambda: make_state(recipe))
    up, table = state.base["decoder"], state.base["embedding"]["embedding"]
    kernels = jax.tree.leaves(up, is_leaf=lambda leaf: isinstance(leaf, Int8 | NF4))
    assert table.dtype == (base if kind is None else "bfloat16")
    if kind is not None:
        assert sum(isinstance(leaf, kind) for leaf in kernels) == 6
    merged = jax.eval_shape(lambda state: merged_params(recipe, state.params, state.base), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {np.dtype("float32")}


# The loss of tokens and classes


@pytest.mark.parametrize("task", ["causal_lm", "seq2seq", "masked_lm", "classifier"])
def test_smoothing_and_z_loss_apply_only_to_training(task):
    random = np.random.default_rng(0)
    shape = (4,) if task == "classifier" else (4, 6)
    logits = random.normal(size=(*shape, 7)).astype(np.float32)
    batch = {"targets": random.integers(0, 7, shape), "weights": np.ones(shape, np.float32)}
    options = {"label_smoothing": 0.2, "z_loss": 0.3}
    configs = [None, TrainingConfig(), *(TrainingConfig(**{name: value}) for name, value in options.items())]

    @jax.jit
    def losses(logits, batch):
        given = [{}, *({name: value} for name, value in options.items())]
        expected = [cross_entropy(logits, **batch, **one)[0] for one in given]
        return [TASKS[task].loss(logits, batch, config)[0] for config in configs], expected

    found, (plain, smooth, z) = jax.device_get(losses(logits, batch))
    np.testing.assert_allclose(found, [plain, plain, smooth, z], rtol=1e-6)
    assert len({round(float(loss), 3) for loss in (plain, smooth, z)}) == 3


def test_the_similarity_of_the_model_selects_the_pair_loss():
    logits, weights = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32), np.ones(5, np.float32)

    @jax.jit
    def losses(logits, weights):
        given = (PairLogits(logits, name) for name in ("softmax", "sigmoid"))
        found = [TASKS["contrastive"].loss(one, {"weights": weights}, None)[0] for one in given]
        return found, [matched_by_softmax(logits, weights)[0], matched_by_sigmoid(logits, weights)[0]]

    found, expected = jax.device_get(losses(logits, weights))
    assert found == expected
    assert abs(expected[0] - expected[1]) > 0.1
