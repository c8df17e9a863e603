"""The losses of preferences equal those of TRL: loss and gradient of one batch, and 20 steps of its trainer."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from flax.traverse_util import flatten_dict, unflatten_dict
from training_recipes import short_recipe

from transformer.data import Preferences
from transformer.inference import open_model
from transformer.training import DPO
from transformer.training._state import make_state
from transformer.training._step import make_train_step
from transformer.training.tasks._table import TASKS

pytestmark = pytest.mark.parity

WORDS = ["<pad>", "<eos>", "the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "yes", "no", "why", "who"]
LENGTH = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Directory of a tiny Llama with random weights, in the format of transformers, and a tokenizer of words."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("trl")
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=3,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="why")
    )
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, pad_token="<pad>", eos_token="<eos>")
    fast.save_pretrained(path)
    return path


def preferences(count=64):
    random = np.random.default_rng(1)

    def words(least, most):
        return " ".join(WORDS[i] for i in random.integers(2, len(WORDS), random.integers(least, most)))

    return [{"prompt": words(1, 5), "chosen": " " + words(1, 7), "rejected": " " + words(1, 7)} for _ in range(count)]


def trainer(folder, workdir, loss, steps=1, **options):
    """Return TRL's trainer, and the list of the batches that it reads."""
    import datasets
    import torch
    import transformers
    import trl

    arguments = trl.DPOConfig(
        output_dir=str(workdir),
        per_device_train_batch_size=4,
        max_steps=steps,
        logging_steps=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        adam_beta2=0.99,
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.5,
        loss_type=[loss],
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        **options,
    )
    load = transformers.LlamaForCausalLM.from_pretrained
    made = trl.DPOTrainer(
        model=load(folder, dtype=torch.float32),
        ref_model=load(folder, dtype=torch.float32),
        args=arguments,
        train_dataset=datasets.Dataset.from_list(preferences()),
        processing_class=transformers.AutoTokenizer.from_pretrained(folder),
    )
    read, collate = [], made.data_collator

    def recorded(examples):
        batch = collate(examples)
        read.append({name: array.clone() for name, array in batch.items()})
        return batch

    made.data_collator = recorded
    return made, read


def our_batch(theirs):
    """Convert TRL's batch, first all chosen and then all rejected sequences (2B, T), to ours, (B, 2, T)."""
    ids, inside = (theirs[name].numpy() for name in ("input_ids", "completion_mask"))
    width = [(0, 0), (0, LENGTH + 1 - ids.shape[1])]
    ids, inside = np.pad(ids, width), np.pad(inside, width)

    def paired(array):
        return np.stack(np.split(array, 2), axis=1)

    return {
        "tokens": jnp.asarray(paired(ids[:, :-1]), jnp.int32),
        "targets": jnp.asarray(paired(ids[:, 1:]), jnp.int32),
        "weights": jnp.asarray(paired(inside[:, 1:]), jnp.float32),
    }


def ours(folder, options):
    """Return our recipe, state and compiled step from the same weights."""
    opened = open_model(folder)
    recipe = short_recipe(
        "dpo",
        opened.model.config,
        Preferences(path="none.jsonl", max_length=LENGTH, batch_size=4),
        optimizer={"learning_rate": 3e-3, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.0},
    )
    recipe = dataclasses.replace(recipe, dpo=options)
    state = jax.jit(lambda: make_state(recipe))()
    state = state.replace(params=opened.params, base=opened.params)
    return recipe, state, jax.jit(make_train_step(recipe))


def gradients_in_file_format(folder, params, gradients, to):
    """Save parameters minus gradients in the format of transformers: so the gradients get its names and layouts."""
    from safetensors.numpy import load_file

    from transformer.inference import save

    model, found = open_model(folder).model, []
    for name, tree in (("from", params), ("to", jax.tree.map(lambda p, g: p - g, params, gradients))):
        save(model, tree, to / name)
        found.append(load_file(to / name / "model.safetensors"))
    return {name: found[0][name] - found[1][name] for name in found[0]}


def test_our_data_has_the_tokens_and_masks_of_trl(folder, tmp_path):
    import json

    rows = preferences()
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = Preferences(path=str(path), max_length=LENGTH, batch_size=4).prepare(open_model(folder).tokenizer)
    made, _ = trainer(folder, tmp_path / "run", "sigmoid")
    for start in (0, 4, 8):
        theirs = our_batch(made.data_collator([made.train_dataset[i] for i in range(start, start + 4)]))
        batch = dataset._assemble("train", np.arange(start, start + 4))
        np.testing.assert_array_equal(batch["weights"], theirs["weights"])
        inside = batch["weights"] > 0
        np.testing.assert_array_equal(batch["targets"][inside], theirs["targets"][inside])
        seen = np.flip(np.maximum.accumulate(np.flip(inside, -1), -1), -1)  # up to the last target
        np.testing.assert_array_equal(batch["tokens"][seen], theirs["tokens"][seen])


@pytest.mark.parametrize("loss", ["sigmoid", "ipo", "hinge", "apo_zero"])
def test_loss_and_gradient_of_a_batch_equal_trl(folder, tmp_path, loss):
    """After a step of both from different weights, so that policy and reference model differ."""
    import torch

    made, _ = trainer(folder, tmp_path / "run", loss)
    recipe, state, _ = ours(folder, DPO(beta=0.5, loss=loss))
    torch.manual_seed(3)
    moved = {name: p + 0.05 * torch.randn_like(p) for name, p in made.model.named_parameters()}
    with torch.no_grad():
        for name, p in made.model.named_parameters():
            p.copy_(moved[name])
    made.model.save_pretrained(tmp_path / "moved")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "moved" / name).write_bytes((folder / name).read_bytes())
    params = open_model(tmp_path / "moved").params
    theirs = made.data_collator([made.train_dataset[i] for i in range(4)])
    expected = made.compute_loss(made.model, dict(theirs))
    expected.backward()

    task, batch = TASKS[recipe.task], our_batch(theirs)
    model = open_model(folder).model

    def mean(params):
        loss_sum, weight, *_ = task.compared(model, params, state.base, batch, recipe.dpo)
        return loss_sum / weight

    value, gradients = jax.jit(jax.value_and_grad(mean))(params)
    assert float(value) == pytest.approx(expected.item(), rel=1e-5)
    found = gradients_in_file_format(folder, jax.tree.map(np.zeros_like, params), gradients, tmp_path)
    for name, p in made.model.named_parameters():
        scale = p.grad.abs().max().item()
        assert scale > 0
        np.testing.assert_allclose(found[name], p.grad.numpy(), rtol=1e-4, atol=1e-5 * max(scale, 1.0), err_msg=name)


def test_label_smoothing_of_single_pairs_equals_aot(folder, tmp_path):
    """TRL has the conservative loss only in `aot`, which sorts the scores of a batch: one pair is sorted already."""
    made, _ = trainer(folder, tmp_path / "run", "aot", label_smoothing=0.2)
    recipe, state, _ = ours(folder, DPO(beta=0.5, label_smoothing=0.2))
    theirs = made.data_collator([made.train_dataset[7]])
    import torch

    with torch.no_grad():
        for p in made.model.parameters():
            p.mul_(1.1)
    params = jax.tree.map(lambda a: a * 1.1, state.params)
    expected = made.compute_loss(made.model, dict(theirs)).item()
    loss, weight, *_ = TASKS["dpo"].compared(
        open_model(folder).model, params, state.base, our_batch(theirs), recipe.dpo
    )
    assert abs(expected - np.log(2)) > 1e-3
    assert float(loss / weight) == pytest.approx(expected, rel=1e-5)


def test_twenty_steps_equal_the_trl_trainer(folder, tmp_path):
    made, read = trainer(folder, tmp_path / "run", "sigmoid", steps=20)
    made.train()
    logged = [line for line in made.state.log_history if "loss" in line]
    _, state, step = ours(folder, DPO(beta=0.5))
    names = {"loss_sum": "loss", "correct": "rewards/accuracies", "reward_margin": "rewards/margins"}
    assert len(logged) == 20
    for line, batch in zip(logged, read, strict=False):
        state, metrics = step(state, our_batch(batch))
        for name, theirs in names.items():
            assert float(metrics[name] / metrics["weight"]) == pytest.approx(line[theirs], abs=1e-4), line
        assert float(metrics["grad_norm"]) == pytest.approx(line["grad_norm"], rel=1e-3)
    assert logged[-1]["loss"] < logged[0]["loss"]
    moved = flatten_dict(jax.tree.map(lambda a, b: np.abs(a - b).max(), state.params, state.base), sep="/")
    assert all(change > 0 for change in moved.values()), unflatten_dict(moved, sep="/")
