"""Learning from preferences: the losses, the reference model, and that the split of a batch changes nothing."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from training_recipes import VOCABULARY, change, compiled_step, short_recipe

from transformer.config import ConfigError, FeedForwardOptions, MoE, TransformerConfig
from transformer.data import Preferences, TextFile, TokenizerConfig
from transformer.inference import start_from
from transformer.nn._sharding import ParallelConfig
from transformer.training import DPO, LoRA, Recipe, TrainingConfig, load_run, override, train
from transformer.training._parallel import place
from transformer.training._recipe import build_model, from_json, to_json
from transformer.training._state import make_state
from transformer.training._step import make_eval_step
from transformer.training.tasks._preference import preference_losses

LENGTH = 7
MODEL = TransformerConfig(
    vocab_size=VOCABULARY, d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5)
)


@functools.cache
def compiled_losses(options):
    return jax.jit(lambda *scores: preference_losses(*scores, options))


def losses(chosen, rejected, lengths=1.0, **options):
    chosen, rejected = (np.atleast_1d(np.float32(scores)) for scores in (chosen, rejected))
    lengths, weights = np.full_like(chosen, lengths), np.ones_like(chosen)
    return np.asarray(compiled_losses(DPO(**options))(chosen, rejected, lengths, weights))


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "apo_zero"])
def test_a_more_probable_chosen_response_lowers_the_loss(loss):
    """From equal models on. Far beyond, ipo rises again, which is its point; the others never do."""
    scores = np.linspace(0.0, 4.0, 9)
    rising = losses(scores, np.zeros(9), beta=0.1, loss=loss)
    falling = losses(np.zeros(9), -scores, beta=0.1, loss=loss)
    assert (np.diff(rising) < 0).all()
    assert (np.diff(falling) < 0).all()
    far = losses([100.0, 101.0], [0.0, 0.0], beta=0.1, loss=loss)
    assert (far[1] > far[0]) == (loss == "ipo")


def test_losses_have_known_values():
    assert float(losses(0.0, 0.0)[0]) == pytest.approx(np.log(2))
    assert losses(0.0, 0.0, loss="hinge") == 1.0
    assert losses(0.0, 0.0, loss="apo_zero") == 1.0
    assert losses(5.0, 0.0, beta=0.1, loss="ipo") == 0.0  # 1 / (2 beta) = 5
    assert losses(10.0, 0.0, lengths=2.0, beta=0.1, loss="ipo") == 0.0  # per token
    for value in (1e4, -1e4):  # no overflow
        assert np.isfinite(losses(value, -value, beta=1.0)).all()


def test_label_smoothing_is_the_mean_over_swapped_pairs():
    plain, swapped = losses(1.5, -0.5, beta=0.7), losses(-0.5, 1.5, beta=0.7)
    smooth = losses(1.5, -0.5, beta=0.7, label_smoothing=0.2)
    np.testing.assert_allclose(smooth, 0.8 * plain + 0.2 * swapped, rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.0}, "beta must be"),
        ({"loss": "kto"}, r"dpo.loss"),
        ({"label_smoothing": 0.5}, r"dpo.label_smoothing.*0.*0.5"),
        ({"label_smoothing": 0.1, "loss": "ipo"}, r"label_smoothing.*dpo.loss"),
    ],
)
def test_rejects_invalid_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        DPO(**fields)


def recipe_of(model=MODEL, options=None, **groups):
    data = Preferences(path="none.jsonl", max_length=LENGTH, batch_size=4, eval_batch_size=4)
    recipe = short_recipe("dpo", model, data, optimizer={"warmup_steps": 0, "schedule": "constant"})
    return dataclasses.replace(change(recipe, **groups), dpo=options)


def batch_of(rows=4, seed=0):
    """Return pairs of random tokens: the first tokens are the prompt, and the responses have different lengths."""
    random = np.random.default_rng(seed)
    ids = random.integers(3, VOCABULARY, (rows, 2, LENGTH + 1)).astype(np.int32)
    places, ends = np.arange(LENGTH), random.integers(4, LENGTH + 1, (rows, 2, 1))
    weights = ((places >= 2) & (places < ends)).astype(np.float32)
    return {"tokens": ids[..., :-1], "targets": ids[..., 1:], "weights": weights}


@functools.cache
def new_state(recipe):
    return jax.jit(lambda: make_state(recipe))()


def moved_state(recipe):
    """Return a state whose model differs from the reference model."""
    state = new_state(recipe)
    moved = jax.tree.map(
        lambda leaf: np.asarray(leaf) + 0.1 * np.cos(np.arange(leaf.size, dtype=np.float32)).reshape(leaf.shape),
        state.params,
    )
    return state.replace(params=moved)


@pytest.mark.slow
def test_the_split_of_a_batch_and_of_the_tokens_changes_nothing():
    """Micro-batches, logits of some tokens at a time, and rows that only fill up the batch."""
    # Adam's first update divides gradients by themselves: a large epsilon keeps it from magnifying rounding errors.
    recipe, batch = change(recipe_of(options=DPO(beta=0.5)), optimizer={"epsilon": 1.0}), batch_of()
    state = moved_state(recipe)
    expected, metrics = compiled_step(recipe)(state, batch)
    assert metrics["weight"] == 4
    assert 0 < metrics["correct"] < 4
    metrics = {name: float(value) for name, value in metrics.items()}
    assert metrics["reward_margin"] == pytest.approx(metrics["chosen_reward"] - metrics["rejected_reward"], rel=1e-5)
    filled = {name: np.concatenate([array, array]) for name, array in batch.items()}
    filled["weights"][4:] = 0.0
    for other, rows in (
        (change(recipe, training={"accumulation": 2}), batch),
        (change(recipe, training={"loss_tokens": 24}), batch),
        (recipe, filled),
    ):
        again, found = compiled_step(other)(state, rows)
        for name in ("loss_sum", "weight", "correct", "reward_margin", "grad_norm"):
            assert float(found[name]) == pytest.approx(metrics[name], rel=2e-5), name
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), again.params, expected.params)


@functools.cache
def compiled_evaluation(recipe):
    return jax.jit(make_eval_step(recipe))


def test_only_responses_count_in_training_and_evaluation():
    recipe, batch = recipe_of(), batch_of()
    state = moved_state(recipe)
    evaluate = compiled_evaluation(recipe)
    sums = evaluate(state.params, batch, state.base)
    _, metrics = compiled_step(recipe)(state, batch)
    for name, value in sums.items():
        assert float(metrics[name]) == pytest.approx(float(value), rel=1e-5), name
    changed = dict(batch, targets=np.where(batch["weights"] > 0, batch["targets"], 4))
    again = evaluate(state.params, changed, state.base)
    assert float(again["loss_sum"]) == pytest.approx(float(sums["loss_sum"]), rel=1e-6)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2, targets=("query", "up"))], ids=["whole", "lora"])
def test_the_reference_is_the_initial_model_and_never_changes(lora):
    """So the first loss is ln 2, without a second copy of the parameters for LoRA."""
    recipe = dataclasses.replace(recipe_of(), lora=lora)
    state = new_state(recipe)
    step = compiled_step(recipe)
    after, first = step(state, batch_of())
    assert float(first["loss_sum"]) / float(first["weight"]) == pytest.approx(np.log(2), rel=1e-6)
    assert float(first["grad_norm"]) > 0
    after, second = step(after, batch_of())
    assert float(second["loss_sum"]) < float(first["loss_sum"])
    jax.tree.map(np.testing.assert_array_equal, after.base, state.base)
    total = sum(leaf.size for leaf in jax.tree.leaves((state.params, state.base)))
    whole = sum(leaf.size for leaf in jax.tree.leaves(state.base))
    assert total == 2 * whole if lora is None else total < 1.5 * whole


@pytest.mark.slow
def test_experts_ignore_padding():
    moe = MoE(num_experts=3, top_k=2)
    kind = dataclasses.replace(MODEL.kinds[0], moe=moe)
    recipe = recipe_of(MODEL.replace(**{"stack.period": (kind,)}))
    batch = batch_of()
    step, state = compiled_step(recipe), moved_state(recipe)
    inside = np.cumsum(batch["weights"][..., ::-1], -1)[..., ::-1] > 0
    changed = dict(batch, tokens=np.where(inside, batch["tokens"], 5))
    one, two = step(state, batch)[1], step(state, changed)[1]
    assert float(one["router_loss"]) == pytest.approx(float(two["router_loss"]), rel=1e-6)
    assert 0 < float(one["router_loss"]) < 1.0  # per pair, not per token


LAYOUTS = {
    "data": ParallelConfig(devices=4),
    "fsdp": ParallelConfig(devices=4, data=1, fsdp=4),
    "tensor": ParallelConfig(devices=2, data=1, tensor=2),
    "pmap": ParallelConfig(kind="pmap", devices=4),
}


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_has_the_losses_of_one_device(layout, lora):
    model = MODEL.replace(vocab_size=16, d_model=8, num_heads=2, **{"feed_forward.d_ff": 8})
    batch, found = batch_of(), {}
    for name, parallel in (("one", ParallelConfig(devices=1)), (layout, LAYOUTS[layout])):
        placement = place(dataclasses.replace(recipe_of(model), parallel=parallel, lora=lora))
        state, losses = placement.spread(placement.new_state()), []
        for _ in range(3):
            state, metrics = placement.train_step(state, batch)
            losses.append(float(metrics["loss_sum"]))
        whole = placement.whole(state)
        if lora is None:
            sums = placement.eval_step(whole.params, batch, whole.base)
            losses += [float(sums["loss_sum"]), float(sums["reward_margin"])]
        found[name] = losses
    assert found[layout] == pytest.approx(found["one"], rel=1e-4)


def test_a_pair_is_counted_if_the_chosen_response_is_the_more_probable_one():
    """For the model and for the reference, by the probabilities of whole responses under each of them."""
    recipe, batch = recipe_of(), batch_of(rows=32)
    state = moved_state(recipe)
    sums = compiled_evaluation(recipe)(state.params, batch, state.base)
    model, rows = build_model(recipe), {name: array.reshape(64, LENGTH) for name, array in batch.items()}
    log_probabilities = jax.jit(lambda params, tokens: jax.nn.log_softmax(model.apply({"params": params}, tokens)))
    expected = []
    for params in (state.params, state.base):
        logits = np.asarray(log_probabilities(params, rows["tokens"]))
        scores = np.take_along_axis(logits, rows["targets"][..., None], -1)[..., 0]
        totals = (scores * rows["weights"]).sum(-1).reshape(32, 2)
        expected.append(float((totals[:, 0] > totals[:, 1]).sum()))
    assert [float(sums[name]) for name in ("prefers_chosen", "reference_prefers_chosen")] == expected
    assert 0 < expected[0] < 32
    assert expected[0] != expected[1]


def test_context_parallelism_and_other_options_are_refused():
    with pytest.raises(ConfigError, match=r"parallel.context \(2\)"):
        dataclasses.replace(recipe_of(), parallel=ParallelConfig(devices=2, data=1, context=2))
    with pytest.raises(ConfigError, match=r"dpo.label_smoothing"):
        change(recipe_of(), training={"label_smoothing": 0.1})
    with pytest.raises(ConfigError, match="dpo has the options of learning from preferences"):
        Recipe(name="no", model=MODEL, data=TextFile(path="a.txt"), dpo=DPO())


def test_options_work_on_the_command_line_and_in_a_recipe():
    recipe = override(recipe_of(), ["--dpo.beta", "0.3", "--dpo.loss", "ipo"], program="train")
    assert recipe.dpo == DPO(beta=0.3, loss="ipo")
    assert from_json(to_json(recipe)) == recipe
    assert override(recipe, ["--dpo", "None"], program="train").dpo is None
    old = to_json(recipe_of())
    del old["recipe"]["dpo"], old["recipe"]["distill"]
    assert from_json(old) == recipe_of()


CHARACTERS = TokenizerConfig(kind="char")
SMALL = TransformerConfig(
    d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8), dropout_rate=0.1
)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Workdir of a run that has learned nothing yet, and pairs of the same characters."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text("".join(f"is {n} odd? yes\nis {n} odd? no\n" for n in range(100)))
    rows = [
        {"prompt": f"is {n} odd?", "chosen": " yes" if n % 2 else " no", "rejected": " no" * (1 + n % 2)}
        for n in range(40)
    ]
    rows = [row | {"rejected": " no" if row["chosen"] == " yes" else " yes"} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = TextFile(path=str(folder / "text.txt"), sequence_length=16, batch_size=4, eval_batch_size=32)
    evaluation = {"every": None, "samples": 0, "sample_tokens": 1}
    train(short_recipe("base", SMALL, data, training={"steps": 2}, evaluation=evaluation), folder / "base")
    return folder


def run_of(base, steps, **groups):
    data = Preferences(path=str(base / "pairs.jsonl"), max_length=20, batch_size=4, eval_batch_size=4)
    recipe = short_recipe("dpo", SMALL, data, training={"steps": steps}, logging={"every": 2})
    return change(recipe, optimizer={"warmup_steps": 1, "schedule": "constant"}, evaluation={"every": 2}, **groups)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2)], ids=["whole", "lora"])
def test_a_run_resumes_bit_for_bit_and_reports_its_measures(base, tmp_path, lora, capsys):
    whole, first = (dataclasses.replace(run_of(base, steps), lora=lora) for steps in (4, 2))
    summary = train(whole, tmp_path / "whole", start=start_from(base / "base", whole))
    assert "reward margin" in capsys.readouterr().out
    train(first, tmp_path / "parts", start=start_from(base / "base", first))
    train(whole, tmp_path / "parts")
    one, two = (load_run(tmp_path / name, "newest").params for name in ("whole", "parts"))
    jax.tree.map(np.testing.assert_array_equal, one, two)
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    names = ("loss", "accuracy", "reward_margin", "chosen_reward", "rejected_reward", "prefers_chosen")
    assert any({f"train/{name}" for name in names} <= line.keys() for line in lines)
    assert any({f"eval/{name}" for name in names} <= line.keys() for line in lines)
    assert summary.held_out.others["reward_margin"] == pytest.approx(
        summary.held_out.others["chosen_reward"] - summary.held_out.others["rejected_reward"], rel=1e-4
    )


@pytest.mark.slow
def test_an_initial_model_is_required(base, tmp_path):
    with pytest.raises(ConfigError, match="--init"):
        train(run_of(base, 2), tmp_path / "run")


def test_rejects_z_loss(tmp_path):
    with pytest.raises(ConfigError, match="belong to the loss of tokens"):
        dataclasses.replace(run_of(tmp_path, 2), training=TrainingConfig(steps=2, z_loss=0.1))
