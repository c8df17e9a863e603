"""Training with rewards: the model learns to earn them, a run resumes bit for bit, and bad rewards are one line."""

import dataclasses
import json
import re
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from training_recipes import assert_equals_resumed_run, change, newest_state

from transformer.__main__ import main
from transformer.config import ConfigError, Execution, FeedForwardOptions, TransformerConfig
from transformer.data import TokenizerConfig, prepare
from transformer.data.kinds._prompts import Prompts
from transformer.inference import _reward_model as inference_reward_model
from transformer.inference import start_from
from transformer.nn._sharding import ParallelConfig
from transformer.training import (
    GRPO,
    CheckpointConfig,
    EvaluationConfig,
    LoggingConfig,
    OptimizerConfig,
    Recipe,
    TrainingConfig,
    load_run,
)
from transformer.training import _batches as rollouts
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import build_model, with_vocabulary
from transformer.training.lora import LoRA
from transformer.training.metrics._summary import read_summary
from transformer.training.metrics._writer import read_metrics
from transformer.training.tasks._rewards import RewardError, Rewards, load_function
from transformer.training.tasks._table import TASKS

REWARDS = """
def share(prompt, completion, letter, **columns):
    assert prompt.startswith("write ")
    return completion.count(letter) / max(len(completion), 1)

def short(completion, **columns):
    return -len(completion) / 10

def broken(completion, **columns):
    return float("nan") if completion else 0.0

def raising(completion, **columns):
    raise KeyError("no such column")

def needy(prompt, completion, missing):
    return 0.0

def equal(**columns):
    return 0.1
"""


@pytest.fixture(scope="module")
def folder(folder):
    (folder / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"write {'ab'[i % 2]} {i % 5}", "letter": "a", "answer": "aaaa"} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def grpo_recipe(folder, *, rewards=("share",), lora=None, parallel=None, grpo=None, **groups):
    names = tuple(f"{folder / 'rewards.py'}:{name}" for name in rewards)
    recipe = Recipe(
        name="tiny",
        model=TransformerConfig(
            d_model=8, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=8), dropout_rate=0.0
        ),
        data=Prompts(
            path=str(folder / "prompts.jsonl"),
            batch_size=4,
            eval_batch_size=4,
            tokenizer=TokenizerConfig(kind="char"),
        ),
        execution=Execution(scan=False),
        parallel=parallel or ParallelConfig(devices=1),
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=0, schedule="constant"),
        training=TrainingConfig(steps=6),
        evaluation=EvaluationConfig(every=3, batches=1, samples=1),
        checkpoint=CheckpointConfig(every=2),
        logging=LoggingConfig(tensorboard=False, progress="lines", every=1),
        lora=lora,
        grpo=GRPO(rewards=names, group_size=4, max_new_tokens=4, beta=0.0),
    )
    return change(recipe, grpo=grpo or {}, **groups)


@pytest.fixture(scope="module")
def trained(folder):
    """A run of 30 steps from random parameters."""
    recipe = grpo_recipe(folder, training={"steps": 30}, evaluation={"every": 15}, checkpoint={"every": None})
    train(recipe, folder / "trained")
    return folder / "trained"


@pytest.fixture(scope="module")
def equally_rewarded(folder):
    """A run of two steps whose completions all have the same reward."""
    recipe = grpo_recipe(folder, rewards=("equal",), optimizer={"weight_decay": 0.0}, training={"steps": 2})
    train(recipe, folder / "equal")
    return folder / "equal"


@pytest.mark.slow
def test_a_tiny_model_learns_to_write_a_letter(trained):
    lines = read_metrics(trained / "metrics.jsonl")
    rewards = [line["train/reward"] for line in lines if "train/reward" in line]
    assert np.mean(rewards[:5]) < 0.25 < 0.6 < np.mean(rewards[-5:])
    last = [line for line in lines if "train/entropy" in line][-1]
    assert 0 < last["train/entropy"] < lines[0]["train/entropy"]
    assert all(line["perf/rollout_s"] > 0 for line in lines if "perf/rollout_s" in line)
    assert 1 <= last["train/completion_length"] <= 4
    evaluated = [line["eval/reward"] for line in lines if "eval/reward" in line]
    assert evaluated[-1] > 0.6
    assert any("eval/exact_match" in line for line in lines)
    summary = read_summary(trained)
    assert summary.eval_loss == pytest.approx(-evaluated[-1]), "the loss of an evaluation is minus the mean reward"
    assert summary.held_out.measures["reward"] > 0.6
    assert "write" in summary.text
    assert "->" in (trained / "samples.txt").read_text()


def test_evaluate_runs_the_rewards_of_a_run_only_if_they_are_trusted(equally_rewarded, folder, capsys):
    """A workdir may come from another person, and its recipe.json names the functions."""
    marker = folder / "ran"
    code = REWARDS + f"\nimport pathlib\npathlib.Path({str(marker)!r}).touch()\n"
    (folder / "rewards.py").write_text(code)
    try:
        assert main(["evaluate", "run", str(equally_rewarded)]) == 2
        assert "If you trust this run, pass --trust-rewards." in capsys.readouterr().err
        assert not marker.exists()
        assert main(["evaluate", "run", str(equally_rewarded), "--trust-rewards"]) == 0
        assert "reward" in capsys.readouterr().out
        assert marker.exists()
    finally:
        (folder / "rewards.py").write_text(REWARDS)


@pytest.mark.slow
@pytest.mark.parametrize("epochs", [1, 2])
def test_a_stopped_run_equals_an_uninterrupted_one_bit_for_bit(folder, epochs):
    recipe = grpo_recipe(folder, grpo={"epochs": epochs}, evaluation={"every": None})
    train(recipe, folder / f"whole{epochs}")
    assert_equals_resumed_run(folder / f"whole{epochs}", recipe, 4, folder / f"resumed{epochs}")


def test_a_batch_contains_the_completions(folder):
    recipe, dataset, state, made = ready(
        grpo_recipe(
            folder, rewards=("share", "short"), grpo={"epochs": 2, "temperature": 1.6}, evaluation={"every": None}
        )
    )
    prompts = dataset.train_batches(0)
    batch = made.batch(state, 0, prompts)
    given = next(dataset.train_batches(0))
    assert batch["tokens"].shape[0] == 16
    for row in range(16):
        length, prompt = given["lengths"][row // 4], dataset.prompts_of("train")[given["rows"][row // 4]]
        inside = batch["weights"][row] > 0
        assert dataset.tokenizer.decode(batch["tokens"][row, :length]) == prompt.prompt
        assert inside.argmax() == length - 1  # the first target is the first token after the prompt
        new = batch["targets"][row][inside].tolist()
        ended = dataset.tokenizer.eos_id in new
        assert batch["truncated"][row] == (not ended)
        assert new.index(dataset.tokenizer.eos_id) == len(new) - 1 if ended else len(new) == 4
        text = dataset.tokenizer.decode(new[: len(new) - ended])
        expected = [text.count("a") / max(len(text), 1), -len(text) / 10]
        np.testing.assert_allclose(batch["rewards"][row], expected, rtol=1e-6)
        np.testing.assert_allclose(batch["reward"][row], sum(expected), rtol=1e-6)
    # `old` has the log-probabilities of the tokens of the model, at the temperature of sampling.
    model = build_model(recipe)
    log_probabilities = jax.jit(lambda params, ids: jax.nn.log_softmax(model.apply({"params": params}, ids) / 1.6))
    scores = log_probabilities(state.params, batch["tokens"])
    chosen = np.take_along_axis(np.asarray(scores), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(batch["old"][batch["weights"] > 0], chosen[batch["weights"] > 0], atol=1e-5)
    again = made.batch(state, 1, prompts)
    assert again is batch  # the second step on the same completions
    other = made.batch(state, 2, dataset.train_batches(0))
    assert (other["targets"] != batch["targets"]).any()  # another key


def ready(recipe):
    """Return (recipe, dataset, state, rollouts) without a workdir."""
    dataset = prepare(recipe.data)
    recipe = with_vocabulary(dataclasses.replace(recipe, data=dataset.config), dataset.tokenizer.vocab_size)
    placement = place(recipe)
    made = rollouts.make_source(recipe, dataset, build_model(recipe), placement, None)
    return recipe, dataset, placement.new_state(), made


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"data": 2}, {"data": 1, "fsdp": 2}, {"data": 1, "tensor": 2}])
def test_completions_do_not_depend_on_the_mesh(folder, axes):
    alone = grpo_recipe(folder, grpo={"epochs": 2, "top_k": 5}, evaluation={"every": None})
    found = []
    for parallel in (alone.parallel, ParallelConfig(devices=2, **axes)):
        recipe, dataset, state, made = ready(dataclasses.replace(alone, parallel=parallel))
        batch = made.batch(state, 0, dataset.train_batches(0))
        found.append((batch, place(recipe).train_step(state, batch)[1]))
    for name in ("tokens", "weights", "rewards"):
        np.testing.assert_array_equal(found[0][0][name], found[1][0][name])
    for name in ("loss_sum", "grad_norm", "entropy"):
        np.testing.assert_allclose(found[0][1][name], found[1][1][name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2, targets=("query", "up"))])
def test_the_reference_is_the_model_before_training(folder, trained, lora):
    recipe = grpo_recipe(folder, lora=lora, grpo={"beta": 0.1, "temperature": 3.0}, training={"steps": 4})
    start = start_from(trained, recipe)
    train(recipe, folder / f"kl{lora is None}", start=start)
    lines = [line for line in read_metrics(folder / f"kl{lora is None}" / "metrics.jsonl") if "train/kl" in line]
    assert lines[0]["train/kl"] == pytest.approx(0, abs=1e-6)
    assert lines[-1]["train/kl"] > 1e-6
    state = newest_state(folder / f"kl{lora is None}")
    if lora is None:
        chex.assert_trees_all_equal(state.base, jax.device_get(load_run(trained).params))


def test_groups_with_equal_rewards_change_nothing(equally_rewarded):
    lines = read_metrics(equally_rewarded / "metrics.jsonl")
    assert lines[0]["train/equal_rewards"] == 1
    assert lines[0]["train/grad_norm"] == 0


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "broken",
            r"rewards.py:broken",
        ),
        ("raising", r"KeyError \('no.*column'\).*prompts.jsonl.*\d+"),
    ],
)
def test_an_invalid_reward_is_a_one_line_error_with_its_row(folder, reward, message):
    dataset = prepare(grpo_recipe(folder).data)
    rewards = Rewards(grpo_recipe(folder, rewards=(reward,)).grpo)
    with pytest.raises(RewardError, match=message) as caught:
        rewards(dataset.prompts_of("train")[:1], ["aa"])
    assert "\n" not in str(caught.value)


def test_rewards_that_cannot_be_used_are_refused_before_training(folder):
    with pytest.raises(ConfigError, match=r"needy.*prompts.jsonl.*1"):
        ready(grpo_recipe(folder, rewards=("needy",)))
    path = folder / "rewards.py"
    for name, message in {
        f"{path}:shar": "has no function 'shar'. Did you mean 'share'",
        f"{folder}/none.py:share": "no file .*none.py",
        "no_such_module:share": "can't be imported: ModuleNotFoundError",
        "share": "must be 'module:function'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            load_function(name)
    assert load_function("math:sqrt")(4) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": ParallelConfig(kind="pmap")}, "parallel.kind pmap can't train on completions"),
        ({"grpo": {"epochs": 4}}, r"training.steps \(6\) must be a multiple of grpo.epochs"),
        ({"rewards": ()}, "grpo.rewards must name a function"),
        ({"grpo": {"reward_model": "dir"}}, None),
        ({"training": {"label_smoothing": 0.1}}, "label_smoothing"),
    ],
)
def test_contradictory_recipes_are_refused(folder, changes, message):
    if message is None:
        with pytest.raises(ConfigError, match="train\\(\\) got no reward_model"):
            ready(grpo_recipe(folder, **changes))
        return
    with pytest.raises(ConfigError, match=message):
        grpo_recipe(folder, **changes)


def test_a_reward_model_scores_prompt_and_completion(folder):
    options = grpo_recipe(folder, grpo={"reward_model": "dir", "reward_weights": (1.0, 10.0)}).grpo
    seen = []

    def model(texts):
        seen.extend(texts)
        return [0.5] * len(texts)

    dataset, rewards = prepare(grpo_recipe(folder).data), Rewards(options, model)
    prompt = dataset.prompts_of("train")[0]
    values = rewards([prompt, prompt], ["aa", "ab"])
    assert rewards.names == ("share", "reward_model")
    assert seen == [f"{prompt.prompt}aa", f"{prompt.prompt}ab"]
    np.testing.assert_allclose(rewards.total(values), [6, 5.5])


@pytest.mark.parametrize(("wanted", "value"), [(None, 0.25), ("bad", 0.75), ("good", 0.25)])
def test_the_reward_is_the_probability_of_the_class_of_the_recipe(folder, monkeypatch, wanted, value):
    probabilities = {"bad": 0.75, "good": 0.25}
    monkeypatch.setattr(inference_reward_model, "load_model", lambda name: name)
    found = SimpleNamespace(probabilities=probabilities)
    monkeypatch.setattr(inference_reward_model, "classify", lambda opened, texts: [found] * len(texts))
    recipe = grpo_recipe(folder, grpo={"reward_model": "dir", "reward_class": wanted})
    assert inference_reward_model.reward_model(recipe)(["a", "b"]) == [value, value]


@pytest.mark.programs(14, reason="sampling with other static settings, and the initial states")
def test_sampling_and_rewards_follow_the_recipe(folder):
    """Temperature, top_k, seed, the weights of the rewards, and the advantages of a normalization."""

    def batch(**grpo):
        seed = grpo.pop("seed", 0)
        options = {"reward_weights": (2.0, -1.0), **grpo}
        recipe = grpo_recipe(
            folder, rewards=("share", "short"), grpo=options, training={"seed": seed}, evaluation={"every": None}
        )
        _, dataset, state, made = ready(recipe)
        if not states:
            states.append(state)
        return made.batch(states[0], 0, dataset.train_batches(0))

    states = []
    plain = batch(normalization="dr_grpo")
    np.testing.assert_allclose(plain["reward"], plain["rewards"] @ [2.0, -1.0], rtol=1e-6)
    groups = plain["reward"].reshape(-1, 4)
    np.testing.assert_allclose(plain["advantages"], (groups - groups.mean(1, keepdims=True)).ravel(), atol=1e-5)
    scaled = batch()
    assert (scaled["tokens"] == plain["tokens"]).all()
    deviations = np.repeat(groups.std(1, ddof=1), 4)
    np.testing.assert_allclose(scaled["advantages"] * (deviations + 1e-4), plain["advantages"], atol=1e-5)
    assert (batch(seed=1)["tokens"] != plain["tokens"]).any()
    greedy = [batch(**options) for options in ({"top_k": 1}, {"temperature": 1e-4})]
    assert (greedy[0]["tokens"] == greedy[1]["tokens"]).all()
    assert (greedy[0]["equal_rewards"] == 1).all()
    assert (plain["equal_rewards"] == 0).any()


@pytest.mark.programs(8, reason="the initial state, a rollout, and the loss")
def test_the_first_step_has_a_probability_ratio_of_1(folder):
    """Rollout and loss use one temperature: no token is clipped, and the loss is minus the sum of the advantages."""
    recipe, dataset, state, made = ready(
        grpo_recipe(folder, grpo={"epochs": 2, "temperature": 1.6}, evaluation={"every": None})
    )
    batch = jax.device_put(made.batch(state, 0, dataset.train_batches(0)))
    model, task = build_model(recipe), TASKS["grpo"]
    compared = jax.jit(lambda params: task.compared(model, params, None, batch, recipe.grpo, deterministic=True)[:3])
    loss, weight, sums = compared(state.params)
    assert float(sums["clipped"]) == 0
    assert float(loss) == pytest.approx(-float(np.sum(batch["advantages"])), abs=1e-4)
    assert float(weight) == 16


def test_prompts_that_cannot_be_used_name_file_and_row(folder, tmp_path):
    for row, message in {
        '{"prompt": 3}': "line 2: prompt must be a text or a list of messages, got 3",
        '{"question": "a"}': "line 2: prompt must be .* got None",
        '{"prompt": "x", "completion": "y"}': "line 2: a column must not be called 'completion'",
        json.dumps({"prompt": "x" * 300}): r"line 2: a prompt must have 1 to 256 tokens .*, got 300",
    }.items():
        path = tmp_path / "prompts.jsonl"
        path.write_text('{"prompt": "x"}\n' + row + "\n")
        with pytest.raises(ValueError, match=message):
            prepare(Prompts(path=str(path), tokenizer=TokenizerConfig(kind="char")))


def test_messages_are_rendered_with_the_template(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": f"add {i}"}], "answer": str(i)} for i in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = prepare(Prompts(path=str(path), tokenizer=TokenizerConfig(kind="byte")))
    batch = next(dataset.train_batches(0))
    names = dataset.tokenizer.tokens(batch["tokens"][0, : batch["lengths"][0]])
    assert names[0] == "<|user|>"
    assert names[-1] == "<|assistant|>"
    assert dataset.tokenizer.eos_id in dataset.end_ids
    assert re.fullmatch("add [0-3]", dataset.prompts()[0])
