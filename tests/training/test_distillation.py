"""Distillation: the loss is its formula, the teacher is frozen, and a student learns faster with a trained teacher."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_recipes import VOCABULARY, change, short_recipe, tiny_batch, tiny_recipe

from transformer.config import ConfigError, FeedForwardOptions, TransformerConfig
from transformer.data import TextFile, TokenizerConfig
from transformer.inference import start_from
from transformer.nn._sharding import ParallelConfig
from transformer.training import Distill, load_run, override, train
from transformer.training._flops import step_flops
from transformer.training._parallel import place
from transformer.training._recipe import build_model, build_teacher, from_json, load_recipe, to_json
from transformer.training._state import make_state
from transformer.training._step import make_train_step
from transformer.training.tasks._distillation import divergence

TEACHER = TransformerConfig(
    vocab_size=VOCABULARY, d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5)
)


def logits(seed, *shape):
    return 2 * np.random.default_rng(seed).normal(size=shape).astype(np.float32)


divergences = jax.jit(divergence, static_argnums=(2, 3))


def softmax(logits, tau):
    p = np.exp(np.float64(logits) / tau)
    return p / p.sum(-1, keepdims=True)


def test_the_divergence_equals_its_definition():
    student, teacher, tau = logits(0, 3, 7), logits(1, 3, 7), 2.5
    p, q = (softmax(x, tau) for x in (teacher, student))
    np.testing.assert_allclose(divergences(student, teacher, tau), tau**2 * (p * np.log(p / q)).sum(-1), rtol=1e-5)
    # The best k tokens, with probabilities that add up to 1.
    for row, kept in zip(p, np.argsort(-p, -1)[:, :2], strict=True):
        mask = np.isin(np.arange(7), kept)
        row[:] = np.where(mask, row, 0) / row[mask].sum()
    expected = tau**2 * np.where(p > 0, p * np.log(np.maximum(p, 1e-30) / q), 0).sum(-1)
    np.testing.assert_allclose(divergences(student, teacher, tau, 2), expected, rtol=1e-5)


@pytest.mark.parametrize("top_k", [None, 3])
def test_the_gradient_of_the_divergence_is_q_minus_p(top_k):
    """tau times the difference of the probabilities; 0 for equal models, and finite for impossible tokens."""
    student, teacher, tau = logits(0, 5), logits(1, 5), 1.7
    gradient_of = jax.jit(jax.value_and_grad(lambda x, teacher: divergence(x, teacher, tau, top_k)))
    kept = teacher if top_k is None else np.where(teacher >= np.sort(teacher)[-3], teacher, -np.inf)
    _, gradient = gradient_of(student, teacher)
    np.testing.assert_allclose(gradient, tau * (softmax(student, tau) - softmax(kept, tau)), atol=1e-5)
    same = jax.jit(jax.value_and_grad(lambda x, teacher: divergence(x, teacher, tau)))(student, student)
    np.testing.assert_allclose(same[0], 0.0, atol=1e-6)
    np.testing.assert_allclose(same[1], 0.0, atol=1e-6)
    _, hard = gradient_of(student, np.array([0.0, -np.inf, -1e9, 1.0, 2.0], np.float32))
    assert np.isfinite(hard).all()


@pytest.mark.parity
@pytest.mark.parametrize("tau", [1.0, 3.0])
def test_the_divergence_and_its_gradient_equal_torch(tau):
    torch = pytest.importorskip("torch")
    student, teacher = logits(0, 4, 11), logits(1, 4, 11)
    x = torch.tensor(np.array(student), requires_grad=True)
    q, p = (torch.log_softmax(one / tau, -1) for one in (x, torch.tensor(np.array(teacher))))
    expected = tau**2 * torch.nn.functional.kl_div(q, p, reduction="sum", log_target=True)
    expected.backward()
    value, gradient = jax.value_and_grad(lambda one: divergence(one, teacher, tau).sum())(jax.device_put(student))
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-4, atol=1e-5)


def distilled(**options):
    return dataclasses.replace(tiny_recipe(), distill=Distill(teacher="teacher", model=TEACHER, **options))


def test_the_step_loss_equals_its_formula_and_the_teacher_is_frozen():
    recipe, batch = distilled(temperature=2.0, weight=0.25, top_k=4), tiny_batch()
    state = jax.jit(lambda: make_state(recipe))()
    after, metrics = jax.jit(make_train_step(recipe))(state, batch)

    def mean(params):
        ours = build_model(recipe).apply({"params": params}, batch["tokens"])
        theirs = build_teacher(recipe).apply({"params": state.teacher}, batch["tokens"])
        true = jnp.take_along_axis(jax.nn.log_softmax(ours), batch["targets"][..., None], -1)[..., 0]
        likely = theirs >= jnp.sort(theirs)[..., -4:-3]  # top_k
        p, log_q = jax.nn.softmax(theirs / 2.0, where=likely), jax.nn.log_softmax(ours / 2.0)
        soft = 4.0 * jnp.where(likely, p * (jnp.log(jnp.where(likely, p, 1.0)) - log_q), 0.0).sum(-1)
        return ((0.75 * soft - 0.25 * true) * batch["weights"]).sum() / batch["weights"].sum()

    value, gradient = jax.jit(jax.value_and_grad(mean))(state.params)
    assert float(metrics["loss_sum"]) / float(metrics["weight"]) == pytest.approx(float(value), rel=1e-5)
    norm = math.sqrt(sum(np.square(leaf).sum() for leaf in jax.tree.leaves(jax.device_get(gradient))))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    jax.tree.map(np.testing.assert_array_equal, after.teacher, state.teacher)


def test_the_forward_pass_of_the_teacher_counts_as_work():
    recipe = distilled()
    alone = [step_flops(dataclasses.replace(recipe, distill=None, model=model)) for model in (recipe.model, TEACHER)]
    found = step_flops(recipe)
    assert found.matrices == alone[0].matrices + alone[1].matrices // 3 > alone[0].matrices
    assert found.attention == alone[0].attention + alone[1].attention // 3 > alone[0].attention


@pytest.mark.slow
def test_the_split_of_a_batch_and_of_the_tokens_changes_nothing():
    # A large epsilon, as in the same test of preferences.
    recipe, batch = change(distilled(top_k=4, weight=0.5), optimizer={"epsilon": 1.0}), tiny_batch()
    state = jax.jit(lambda: make_state(recipe))()
    expected, metrics = jax.jit(make_train_step(recipe))(state, batch)
    for options in ({"accumulation": 2}, {"loss_tokens": 16}, {"loss_tokens": 8, "accumulation": 4}):
        again, found = jax.jit(make_train_step(change(recipe, training=options)))(state, batch)
        for name in ("loss_sum", "weight", "grad_norm"):
            assert float(found[name]) == pytest.approx(float(metrics[name]), rel=2e-5), (options, name)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), again.params, expected.params)


LAYOUTS = {
    "fsdp": ParallelConfig(devices=4, data=1, fsdp=4),
    "tensor": ParallelConfig(devices=2, data=1, tensor=2),
    "context": ParallelConfig(devices=2, data=1, context=2),
    "pmap": ParallelConfig(kind="pmap", devices=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_has_the_losses_of_one_device(layout):
    sizes = {"vocab_size": 16, "d_model": 8, "num_heads": 2, "feed_forward.d_ff": 8}
    recipe = dataclasses.replace(distilled(temperature=2.0, weight=0.2), model=TEACHER.replace(**sizes))
    recipe = dataclasses.replace(
        recipe, distill=dataclasses.replace(recipe.distill, model=TEACHER.replace(**sizes, num_layers=2))
    )
    recipe = change(recipe, data={"sequence_length": 8})
    batch = {name: np.pad(np.asarray(array), [(0, 0), (0, 1)]) for name, array in tiny_batch().items()}
    found = {}
    for name, parallel in (("one", ParallelConfig(devices=1)), (layout, LAYOUTS[layout])):
        placement = place(dataclasses.replace(recipe, parallel=parallel))
        state, losses = placement.spread(placement.new_state()), []
        for _ in range(3):
            state, metrics = placement.train_step(state, batch)
            losses.append(float(metrics["loss_sum"]))
        found[name] = losses
    assert found[layout] == pytest.approx(found["one"], rel=1e-4)


def test_rejects_invalid_options():
    for fields, message in (
        ({"temperature": 0.0}, "temperature must be"),
        ({"top_k": 0}, "top_k must be"),
        ({"weight": 1.0}, "distill.weight must be at least 0 and below 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Distill(teacher="x", **fields)
    with pytest.raises(ConfigError, match="can't be combined with distill"):
        change(distilled(), training={"label_smoothing": 0.1})
    with pytest.raises(ConfigError, match="its model was not loaded"):
        build_teacher(dataclasses.replace(tiny_recipe(), distill=Distill(teacher="x")))


def test_options_work_on_the_command_line_and_in_a_recipe():
    recipe = override(tiny_recipe(), ["--distill.teacher", "runs/big", "--distill.top-k", "8"], program="train")
    assert recipe.distill == Distill(teacher="runs/big", top_k=8)
    whole = distilled()
    assert from_json(to_json(whole)) == whole


CHARACTERS = TokenizerConfig(kind="char")


def text_recipe(folder, name, steps, text="text.txt", **sizes):
    model = TransformerConfig(
        **({"num_heads": 2, "num_layers": 1, "feed_forward.d_ff": 32, "d_model": 16, "dropout_rate": 0.0} | sizes)
    )
    data = TextFile(path=str(folder / text), sequence_length=16, batch_size=8, eval_batch_size=32, tokenizer=CHARACTERS)
    return short_recipe(
        name,
        model,
        data,
        optimizer={"learning_rate": 1e-2, "warmup_steps": 2, "schedule": "constant"},
        training={"steps": steps},
        evaluation={"every": None, "samples": 0, "sample_tokens": 1},
        logging={"every": 5},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Text from a Markov chain: a trained model knows the probabilities of the next one, a short text does not."""
    folder = tmp_path_factory.mktemp("texts")
    random = np.random.default_rng(0)
    chain = random.dirichlet(np.full(12, 0.2), 12)
    text, now = [], 0
    for _ in range(20_000):
        now = random.choice(12, p=chain[now])
        text.append("abcdefghijkl"[now])
    (folder / "text.txt").write_text("".join(text))
    (folder / "short.txt").write_text("".join(text[:400]))
    (folder / "other.txt").write_text("".join(text[:400]) + "xyz")
    train(text_recipe(folder, "teacher", 150), folder / "teacher")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_teacher_improves_a_student_on_the_same_text(folder, tmp_path, seed):
    """400 characters show each transition a few times; the teacher has seen 20,000."""
    losses = {}
    for name in ("alone", "taught"):
        recipe = change(text_recipe(folder, name, 60, "short.txt"), training={"seed": seed})
        recipe = change(
            recipe, data={"validation_path": str(folder / "text.txt")}, evaluation={"every": 60, "batches": 20}
        )
        teacher = None
        if name == "taught":
            recipe = dataclasses.replace(recipe, distill=Distill(teacher=str(folder / "teacher")))
            teacher = start_from(folder / "teacher", recipe)
        losses[name] = train(recipe, tmp_path / name, teacher=teacher).eval_loss
    assert losses["taught"] < losses["alone"] - 0.05, losses


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_without_the_teacher_s_directory(folder, tmp_path):
    def recipe(steps):
        return dataclasses.replace(
            text_recipe(folder, "student", steps, "short.txt"), distill=Distill(teacher=str(folder / "teacher"))
        )

    teacher = start_from(folder / "teacher", recipe(4))
    train(recipe(4), tmp_path / "whole", teacher=teacher)
    train(recipe(2), tmp_path / "parts", teacher=teacher)
    train(dataclasses.replace(recipe(4), distill=Distill(teacher="moved")), tmp_path / "parts")
    one, two = (load_run(tmp_path / name, "newest").params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    assert load_recipe(tmp_path / "parts").distill.fingerprint == teacher.fingerprint
    with pytest.raises(ValueError, match=r"distill.temperature"):
        train(dataclasses.replace(recipe(4), distill=Distill(temperature=2.0)), tmp_path / "parts")


@pytest.mark.slow
def test_an_unsuitable_teacher_is_refused(folder, tmp_path):
    recipe = dataclasses.replace(text_recipe(folder, "student", 2, "short.txt"), distill=Distill(teacher="t"))
    teacher = start_from(folder / "teacher", recipe)
    with pytest.raises(ConfigError, match="distill needs a teacher"):
        train(recipe, tmp_path / "a")
    with pytest.raises(ConfigError, match="has no tokenizer"):
        train(recipe, tmp_path / "a", teacher=dataclasses.replace(teacher, tokenizer=None))
    with pytest.raises(ConfigError, match="the recipe has no distill"):
        train(dataclasses.replace(recipe, distill=None), tmp_path / "a", teacher=teacher)
    train(text_recipe(folder, "other", 1, "other.txt"), folder / "other")
    start = start_from(folder / "other", recipe)
    with pytest.raises(ConfigError, match="has a different tokenizer from"):
        train(recipe, tmp_path / "a", start=start, teacher=teacher)
    with pytest.raises(ConfigError, match=r"has 15 logits per token, and the model 40"):
        train(dataclasses.replace(recipe, model=recipe.model.replace(vocab_size=40)), tmp_path / "a", teacher=teacher)
    assert not (tmp_path / "a" / "recipe.json").exists()
    assert json.loads((folder / "teacher" / "recipe.json").read_text())["recipe"]["distill"] is None
