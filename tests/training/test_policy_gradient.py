"""The loss of GRPO equals the formula of the paper, and TRL's, in value and gradient."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numeric_parts import random_params
from parity_tools import close

from transformer.config import ConfigError, Execution, LayerKind, MoE, llama_decoder
from transformer.nn.models import CausalLM
from transformer.training.tasks._log_probabilities import token_values
from transformer.training.tasks._policy_gradient import GRPO, advantages, equal_rewards, policy_loss, token_scores
from transformer.training.tasks._table import TASKS

ROWS, LENGTH, VOCABULARY = 6, 5, 11


@functools.partial(jax.jit, static_argnums=2)
def scores_of(logits, targets, temperature):
    return token_scores(logits, targets, temperature)[0]


@functools.cache
def example(seed=0, *, far=1.0):
    """Return logits of the policy and a batch whose old policy and reference differ from it."""
    random = np.random.default_rng(seed)
    logits = random.normal(0, 2, (ROWS, LENGTH, VOCABULARY)).astype(np.float32)
    targets = random.integers(0, VOCABULARY, (ROWS, LENGTH))
    scores = np.array(scores_of(logits, targets, 0.7))
    weights = (np.arange(LENGTH)[None] < 1 + np.arange(ROWS)[:, None] % LENGTH).astype(np.float32)
    batch = {
        "targets": targets,
        "weights": weights,
        "advantages": advantages(random.normal(0, 1, (2, ROWS // 2))).reshape(-1),
        "old": scores + random.normal(0, 0.3 * far, scores.shape).astype(np.float32),
        "reference": scores + random.normal(0, 0.5 * far, scores.shape).astype(np.float32),
    }
    return logits, batch


def loss_of(logits, batch, options):
    total, weight, _ = policy_loss(token_scores(logits, batch["targets"], options.temperature)[0], batch, options)
    return total / weight


def options(**fields):
    return GRPO(**{"rewards": ("rewards:length",), "temperature": 0.7, "max_new_tokens": 9} | fields)


def test_the_loss_equals_the_formula_of_the_paper():
    logits, batch = example()
    how = options(beta=0.3, clip=0.1, clip_high=0.25)
    expected = 0.0
    for i in range(ROWS):
        row = 0.0
        length = int(batch["weights"][i].sum())
        for t in range(length):
            scaled = logits[i, t].astype(np.float64) / 0.7
            log_p = scaled[batch["targets"][i, t]] - np.log(np.exp(scaled).sum())
            ratio, a = np.exp(log_p - batch["old"][i, t]), batch["advantages"][i]
            kl = np.exp(batch["reference"][i, t] - log_p) - (batch["reference"][i, t] - log_p) - 1
            row += -min(ratio * a, min(max(ratio, 0.9), 1.25) * a) + 0.3 * kl
        expected += row / length
    found = jax.jit(loss_of, static_argnums=2)(logits, batch, how)
    np.testing.assert_allclose(found, expected / ROWS, rtol=1e-5)


@pytest.mark.parametrize("normalization", ["grpo", "dapo", "dr_grpo"])
def test_micro_batches_and_padding_rows_do_not_change_the_loss(normalization):
    logits, batch = example()
    how = options(normalization=normalization)
    scores = np.asarray(scores_of(logits, batch["targets"], 0.7))
    loss = jax.jit(lambda scores, batch: policy_loss(scores, batch, how))
    whole = jax.device_get(loss(scores, batch))
    parts = [
        jax.device_get(loss(scores[rows], {name: array[rows] for name, array in batch.items()}))
        for rows in (slice(0, 2), slice(2, ROWS))
    ]
    for ours, theirs in zip(jax.tree.leaves(whole), jax.tree.leaves(jax.tree.map(np.add, *parts)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    empty = {name: np.concatenate([array, array[:1] * 0]) for name, array in batch.items()}
    filled = loss(np.concatenate([scores, np.full_like(scores[:1], 300.0)]), empty)
    assert [float(x) for x in jax.tree.leaves(filled[:2])] == pytest.approx([float(x) for x in whole[:2]])


@pytest.mark.parametrize("normalization", ["grpo", "dapo"])
def test_micro_batches_do_not_change_the_router_loss(normalization):
    """Completions of 1, 1, 5 and 5 tokens: the mean of a micro-batch must not count as often as it has tokens."""
    kind = LayerKind(moe=MoE(num_experts=3, top_k=2))
    config = llama_decoder(vocab_size=11, d_model=6, num_layers=1, num_heads=1, **{"feed_forward.d_ff": 8})
    model = CausalLM(config.replace(**{"stack.period": (kind,)}), Execution(scan=False))
    random, lengths = np.random.default_rng(0), np.array([1, 1, 5, 5])
    inside = np.arange(6)[None] < lengths[:, None]
    each = ("advantages", "reward", "reward_std", "equal_rewards", "truncated")
    batch = {
        "tokens": random.integers(0, 11, (4, 6)),
        "targets": random.integers(0, 11, (4, 6)),
        "weights": inside.astype(np.float32),
        "lengths": lengths,
        "rewards": np.zeros((4, 1), np.float32),
    } | dict.fromkeys(each, np.zeros(4, np.float32))
    params = random_params(model, batch["tokens"])["params"]
    how = options(beta=0.0, normalization=normalization)

    @jax.jit
    def router_losses(params, *batches):
        return [TASKS["grpo"].compared(model, params, None, one, how)[3] for one in batches]

    halves = [{name: array[rows] for name, array in batch.items()} for rows in (slice(0, 2), slice(2, 4))]
    whole, *parts = map(float, router_losses(params, batch, *halves))
    assert sum(parts) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("advantage", "ratios"), [(0.5, [1.3]), (0.0, []), (-0.5, [0.8])])
def test_a_token_is_clipped_if_its_loss_has_no_gradient(advantage, ratios):
    """With a clip of 0.1 and 0.25; an advantage of 0 has no gradient for any ratio, and does not count."""
    all_ratios = np.array([[0.8, 1.0, 1.3]], np.float32)
    batch = {
        "weights": np.ones((1, 3), np.float32),
        "advantages": np.array([advantage], np.float32),
        "old": -np.log(all_ratios),
    }
    how = options(beta=0.0, clip=0.1, clip_high=0.25)
    _, _, measures = jax.jit(lambda scores: policy_loss(scores, batch, how))(np.zeros((1, 3), np.float32))
    assert measures["clipped"] == len(ratios)
    slopes = jax.jit(jax.grad(lambda scores: policy_loss(scores, batch, how)[0]))(np.zeros((1, 3), np.float32))
    flat = all_ratios[np.asarray(slopes) == 0].tolist()
    assert flat == pytest.approx(ratios if advantage else [0.8, 1.0, 1.3])


def test_without_an_old_policy_the_gradient_is_the_policy_gradient():
    logits, batch = example(far=0.0)
    batch = {name: array for name, array in batch.items() if name != "old"}
    how = options(beta=0.0, normalization="dapo")

    def plain(logits):  # REINFORCE: A grad ln pi
        scores = token_scores(logits, batch["targets"], 0.7)[0]
        return -(scores * batch["advantages"][:, None] * batch["weights"]).sum() / batch["weights"].sum()

    found, expected = jax.jit(lambda logits: (jax.grad(loss_of)(logits, batch, how), jax.grad(plain)(logits)))(logits)
    close(found, np.array(expected))


def test_advantages_are_normalized_within_the_group():
    rewards = np.array([[1.0, 2.0, 6.0], [0.1, 0.1, 0.1]])
    found = advantages(rewards)
    np.testing.assert_allclose(found[0], (rewards[0] - 3) / (np.std(rewards[0], ddof=1) + 1e-4), rtol=1e-6)
    assert not found[1].any()  # 0.1 + 0.1 + 0.1 is not 3 x 0.1 in floating-point numbers
    np.testing.assert_allclose(advantages(rewards, scale=False)[0], [-2, -1, 3])
    assert equal_rewards(rewards).tolist() == [False, True]


def test_scores_are_log_probabilities_and_entropies_of_the_scaled_logits():
    logits, batch = example()
    scaled = logits.astype(np.float64) / 0.7
    log_p = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
    scores, entropy = jax.jit(lambda logits: token_scores(logits, batch["targets"], 0.7))(logits)
    expected = np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(scores, expected, rtol=1e-4)
    np.testing.assert_allclose(entropy, -(np.exp(log_p) * log_p).sum(-1), rtol=1e-4)


@pytest.mark.slow
def test_chunked_logits_do_not_change_scores_or_gradients():
    random = np.random.default_rng(1)
    model = CausalLM(
        llama_decoder(vocab_size=11, d_model=6, num_layers=1, num_heads=1, **{"feed_forward.d_ff": 8}),
        Execution(scan=False),
    )
    tokens, targets = jnp.asarray(random.integers(0, 11, (2, 3, 7)))
    params = model.init(jax.random.key(0), tokens)["params"]

    def total(params, at_once):
        function = functools.partial(token_scores, temperature=0.7)
        found, _ = token_values(function, model, params, {"tokens": tokens}, targets, tokens=at_once)
        return (found[0] * np.arange(1, 8)[None]).sum(), found

    whole, parts = (jax.grad(total, has_aux=True)(params, at_once) for at_once in (0, 6))  # 1 piece, and 4
    jax.tree.map(lambda a, b: close(a, np.array(b)), parts, whole)
    p = jax.nn.softmax(model.apply({"params": params}, tokens) / 0.7)
    close(parts[1][1], np.array(-(p * jnp.log(p)).sum(-1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_weights": (1.0, 2.0)}, "one number for each of the 1 rewards"),
        ({"reward_weights": (float("nan"),)}, "finite"),
        ({"group_size": 1}, "grpo.group_size"),
        ({"beta": -0.1}, r"grpo.beta"),
        ({"normalization": "bnpo"}, r"grpo.normalization"),
        ({"temperature": 0.0}, "grpo.temperature"),
        ({"top_k": 0}, r"grpo.top_k.* 1, got 0"),
        ({"epochs": 0}, r"grpo.epochs.* 1, got 0"),
        ({"clip_high": 0.0}, r"grpo.clip_high.*got 0"),
    ],
)
def test_rejects_invalid_options(fields, message):
    with pytest.raises(ConfigError, match=message):
        options(**fields)


class Accelerator:
    """The part of `accelerate.Accelerator` that TRL's loss uses, for one process."""

    num_processes = 1

    def reduce(self, tensor, reduction=None):
        return tensor

    gather = gather_for_metrics = staticmethod(lambda tensor: tensor)


def trl_loss(torch, logits, batch, how):
    """Compute the loss with `GRPOTrainer._compute_loss` of TRL, whose model returns log-probabilities of our logits."""
    trl = pytest.importorskip("trl.trainer.grpo_trainer")
    from collections import defaultdict

    tensors = {name: torch.tensor(np.asarray(array)) for name, array in batch.items()}
    scaled = torch.log_softmax(logits / how.temperature, -1)
    log_probs = torch.gather(scaled, -1, tensors["targets"][..., None])[..., 0]
    entropies = -(scaled.exp() * scaled).sum(-1)
    trainer = types.SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, entropies, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=how.beta,
        loss_type=how.normalization,
        epsilon_low=how.clip,
        epsilon_high=how.highest,
        args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        max_completion_length=how.max_new_tokens,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=Accelerator(),
        model=types.SimpleNamespace(training=True),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    inputs = {
        "prompt_ids": torch.zeros((ROWS, 1), dtype=torch.long),
        "prompt_mask": torch.ones((ROWS, 1)),
        "completion_ids": tensors["targets"],
        "completion_mask": tensors["weights"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors.get("old"),
        "ref_per_token_logps": tensors["reference"],
        "num_items_in_batch": tensors["weights"].sum(),
    }
    return trl.GRPOTrainer._compute_loss(trainer, None, inputs), trainer._metrics["train"]


@pytest.mark.parity
@pytest.mark.parametrize("old", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("normalization", ["grpo", "dapo", "dr_grpo"])
def test_the_loss_equals_trl(normalization, beta, old):
    torch = pytest.importorskip("torch")
    logits, batch = example(3)
    batch = {name: array for name, array in batch.items() if old or name != "old"}
    how = options(beta=beta, normalization=normalization, clip=0.1, clip_high=0.3)
    theirs = torch.tensor(logits, requires_grad=True)
    expected, metrics = trl_loss(torch, theirs, batch, how)
    expected.backward()
    found, gradient = jax.value_and_grad(loss_of)(jnp.asarray(logits), batch, how)
    np.testing.assert_allclose(found, expected.item(), atol=1e-5)
    close(gradient, theirs.grad)
    _, _, measures = policy_loss(token_scores(jnp.asarray(logits), batch["targets"], 0.7)[0], batch, how)
    means = {name: float(total / measures["tokens"]) for name, total in measures.items()}
    assert means["clipped"] == pytest.approx(metrics["clip_ratio/region_mean"][0], abs=1e-6)
    assert not old or means["clipped"] > 0
    assert means.get("kl") == (pytest.approx(metrics["kl"][0], abs=1e-5) if beta else None)


@pytest.mark.parity
def test_the_advantages_equal_trl():
    torch = pytest.importorskip("torch")
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    theirs = torch.tensor(rewards)
    expected = (theirs - theirs.mean(1, keepdim=True)) / (nanstd(theirs, dim=1)[:, None] + 1e-4)
    np.testing.assert_allclose(advantages(rewards), expected, atol=1e-5)
