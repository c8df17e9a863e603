"""Fine-tuning on conversations: packed rows, layouts, resumed runs, pretrained models with a template, and TRL."""

import dataclasses
import json
from datetime import datetime
from pathlib import Path

import jax
import numpy as np
import pytest
from chat_parts import template, write_chat_model
from numeric_parts import random_params
from training_recipes import assert_equals_resumed_run, change, short_recipe

from transformer.__main__ import run_command
from transformer.chat import Chat, ChatEncoder, find_template
from transformer.config import ALiBiOptions, LearnedOptions, RotaryOptions, TransformerConfig, llama_decoder
from transformer.data import Conversations, JsonLines, TokenizerConfig, prepare
from transformer.data._turns import Conversation, encode
from transformer.inference import export, open_model, start_from
from transformer.nn._sharding import ParallelConfig
from transformer.training import TrainingConfig
from transformer.training._completion import complete_recipe, without_data
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import build_model, with_vocabulary
from transformer.training._start import initialize_from
from transformer.training._step import training_loss
from transformer.training.lora import LoRA
from transformer.training.metrics._report import read_example
from transformer.training.metrics._writer import read_metrics
from transformer.training.plan._measurement import made_up_batch
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._runs import load_run


def write_conversations(folder, rows=40):
    """Write conversations of one or two turns, and return the path."""
    path = folder / "conversations.jsonl"
    if not path.exists():
        lines = []
        for number in range(rows):
            turns = [("user", f"What is {number}?"), ("assistant", f"{number}, of {number % 7}.")]
            turns += [("user", "Sure?"), ("assistant", "Yes.")] * (number % 3 == 0)
            lines.append(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
        path.write_text("\n".join(lines))
    return str(path)


def recipe_for(folder, *, lora=None, data=None, **groups):
    """Return a recipe of twelve steps on conversations, with dropout."""
    data = data or Conversations(
        path=write_conversations(folder),
        sequence_length=64,
        batch_size=4,
        eval_batch_size=2,
        tokenizer=TokenizerConfig(kind="char"),
    )
    recipe = short_recipe(
        "tiny",
        llama_decoder(d_model=8, num_heads=2, num_layers=1, **{"feed_forward.d_ff": 8}, dropout_rate=0.1),
        data,
        optimizer={"warmup_steps": 2, "learning_rate": 1e-2, "schedule": "constant"},
        training={"steps": 12},
        evaluation={"every": 6, "samples": 1, "sample_tokens": 5},
        checkpoint={"every": 5},
        logging={"every": 4},
    )
    return change(dataclasses.replace(recipe, lora=lora), **groups)


# Packed rows


@pytest.mark.parametrize(
    ("kind", "position"),
    [
        ("conversations", RotaryOptions()),
        pytest.param("conversations", ALiBiOptions(), marks=pytest.mark.slow),
        pytest.param("conversations", LearnedOptions(max_length=64), marks=pytest.mark.slow),
        pytest.param("documents", RotaryOptions(), marks=pytest.mark.slow),
    ],
)
def test_packed_rows_have_the_loss_and_gradients_of_separate_rows(tmp_path, kind, position):
    if kind == "conversations":
        packed = Conversations(
            path=write_conversations(tmp_path), sequence_length=64, tokenizer=TokenizerConfig(kind="char")
        )
        alone = dataclasses.replace(packed, packing=False)
    else:
        path = tmp_path / "documents.jsonl"
        path.write_text("\n".join(json.dumps({"text": "abc " * (i % 5 + 1)}) for i in range(20)))
        packed = alone = JsonLines(path=str(path), sequence_length=64, packing=True)
    many, few = prepare(alone), prepare(packed)
    rows = [
        many._assemble("train", np.arange(many._size("train"))),
        few._assemble("train", np.arange(few._size("train"))),
    ]
    if kind == "documents":  # by hand: each document in its own row
        rows[0] = separated(rows[1])
    assert len(rows[1]["tokens"]) < len(rows[0]["tokens"]) / 2
    plain = {name: rows[0][name] for name in ("tokens", "targets", "weights")}  # without segments and positions
    model = {
        "d_model": 8,
        "num_heads": 2,
        "num_layers": 2,
        "feed_forward.d_ff": 8,
        "dropout_rate": 0.0,
        "position": position,
    }
    recipe = with_vocabulary(recipe_for(tmp_path, data=packed, model=model), few.tokenizer.vocab_size)
    made = build_model(recipe)
    params = random_params(made, plain["tokens"])["params"]

    @jax.jit
    @jax.value_and_grad
    def mean_loss(params, batch):
        loss, weight, _ = training_loss(recipe.task, made, params, batch, TrainingConfig(), None)
        return loss / weight

    results = [mean_loss(params, batch) for batch in (plain, *rows)]
    for loss, gradient in results[1:]:
        np.testing.assert_allclose(loss, results[0][0], rtol=1e-6)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradient, results[0][1])


def separated(batch):
    """Return the segments of a packed batch in separate rows."""
    found = []
    for row in range(len(batch["tokens"])):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            inside = batch["segment_ids"][row] == segment
            parts = {name: np.zeros_like(array[row]) for name, array in batch.items()}
            for name, array in batch.items():
                parts[name][: inside.sum()] = array[row][inside]
            found.append(parts)
    return {name: np.stack([one[name] for one in found]) for name in batch}


def test_text_in_another_conversation_has_no_effect(tmp_path):
    """Changing the first conversation of a row changes no logits of the second, but those of the first."""
    recipe = recipe_for(tmp_path, model={"dropout_rate": 0.0})
    dataset = prepare(recipe.data)
    recipe = with_vocabulary(recipe, dataset.tokenizer.vocab_size)
    batch = dataset._assemble("train", np.arange(1))
    assert batch["segment_ids"].max() > 1
    model = build_model(recipe)
    params = random_params(model, batch["tokens"])["params"]
    forward = jax.jit(lambda batch: TASKS["sft"].forward(model, {"params": params}, batch, deterministic=True))

    other = {**batch, "tokens": np.where(batch["segment_ids"] == 1, 5, batch["tokens"])}
    before, after = (np.asarray(forward(one)) for one in (batch, other))
    np.testing.assert_array_equal(before[batch["segment_ids"] > 1], after[batch["segment_ids"] > 1])
    assert not np.allclose(before[batch["segment_ids"] == 1], after[batch["segment_ids"] == 1])


# Layouts

LAYOUTS = {
    "data": ParallelConfig(data=4, devices=4),
    "fsdp": ParallelConfig(data=1, fsdp=2, devices=2),
    "tensor": ParallelConfig(data=1, tensor=2, devices=2),
    "context": ParallelConfig(data=1, context=2, devices=2),
    "pmap": ParallelConfig(kind="pmap", devices=2),
}


@pytest.fixture(scope="module")
def one_step(folder):
    """A function from a layout to the metrics of the first step."""
    recipe = recipe_for(folder, model={"dropout_rate": 0.0})
    dataset = prepare(recipe.data)
    batch = next(dataset.train_batches(0))

    def run(parallel):
        own = with_vocabulary(dataclasses.replace(recipe, parallel=parallel), dataset.tokenizer.vocab_size)
        placement = place(own)
        return jax.device_get(placement.train_step(placement.spread(placement.new_state()), batch)[1])

    return run


@pytest.fixture(scope="module")
def alone(one_step):
    return one_step(ParallelConfig(devices=1))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_sharding_trains_identically(one_step, alone, layout):
    found = one_step(LAYOUTS[layout])
    for name in ("loss_sum", "weight", "grad_norm"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-5)


# Runs


@pytest.fixture(scope="module")
def finished(folder):
    """An uninterrupted run from scratch."""
    assert train(recipe_for(folder), folder / "whole").finished
    return folder / "whole"


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(folder, finished):
    assert_equals_resumed_run(finished, recipe_for(folder), 7, folder / "stopped")


def test_a_run_logs_padding_and_stores_its_example(finished, capsys):
    assert all(
        0 < line["data/padding"] < 0.5 for line in read_metrics(finished / "metrics.jsonl") if "train/loss" in line
    )
    parts = read_example(finished)
    assert ("0, of 0.<eos>", True) in parts
    assert parts[0] == ("<|user|>What is 0?<|assistant|>", False)
    run_command(["report", str(finished)])
    page = (finished / "report.html").read_text()
    assert "<mark>0, of 0.&lt;eos&gt;</mark>" in page
    assert " answer " in page


@pytest.mark.slow
def test_a_trained_model_can_be_evaluated_and_used_in_chat(folder, finished, capsys):
    run_command(["evaluate", "run", str(finished), "--json"])
    assert json.loads(capsys.readouterr().out)["targets"] > 0
    run_command(["answer", str(finished), "--prompt", "What is 1?", "--max-new-tokens", "4"])
    assert capsys.readouterr().out.strip()
    run = load_run(finished)
    chat = Chat(run.model, run.params, run.tokenizer)
    assert run.tokenizer.eos_id in chat.eos_ids
    messages = [{"role": "user", "content": "What is 1?"}]
    assert chat.encode(messages, add_generation_prompt=True).text == "<|user|>What is 1?<|assistant|>"
    # The export has the template in tokenizer_config.json, and answers alike.
    export(open_model(finished), folder / "exported", family="llama")
    assert "chat_template" in json.loads((folder / "exported" / "tokenizer_config.json").read_text())
    other = open_model(folder / "exported")
    again = Chat(other.model, other.params, other.tokenizer).reply(messages, max_new_tokens=5)
    assert again.tokens == chat.reply(messages, max_new_tokens=5).tokens


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoRA(rank=2, alpha=4.0)])
def test_a_pretrained_model_keeps_its_template(folder, lora, capsys):
    source = folder / "weights"
    if not source.exists():
        write_chat_model(source)
    recipe = recipe_for(folder, lora=lora, training={"steps": 4}, evaluation={"every": 4})
    recipe = change(recipe, data={"sequence_length": 128})
    workdir = folder / f"from_weights_{lora is not None}"
    train(recipe, workdir, start=start_from(source, recipe))
    out = capsys.readouterr().out
    assert "<|im_start|>assistant\n[0, of 0.<|im_end|>]\n" in out
    run = load_run(workdir)
    assert find_template(run.tokenizer.files).source == template("smollm")
    assert run.tokenizer.vocab_size == open_model(source).tokenizer.vocab_size
    assert Chat(run.model, run.params, run.tokenizer).reply([{"role": "user", "content": "Hi"}], max_new_tokens=3)
    if lora is not None:
        train(recipe, workdir)  # finished: the workdir has everything that is needed to go on


def test_a_plan_needs_no_data():
    recipe = recipe_for(None, data=Conversations(path="missing.jsonl", sequence_length=32, batch_size=2))
    complete, assumed = without_data(recipe)
    assert assumed == ["a vocabulary of 8,192 (--model.vocab-size)"]
    batch = made_up_batch(complete)
    assert {name: array.shape for name, array in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "weights", "segment_ids", "positions"), (2, 32)
    )
    assert batch["positions"].max() == 31


# TRL


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """A directory of weights, and its tokenizer in transformers."""
    pytest.importorskip("trl")
    transformers = pytest.importorskip("transformers")
    folder = write_chat_model(tmp_path_factory.mktemp("llama"), "documents", seed=100)
    return folder, transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parity
class TestTRL:
    def test_loss_masks_equal_the_reference(self, theirs):
        folder, tokenizer = theirs
        ours = open_model(folder).tokenizer
        encoder = ChatEncoder(find_template(ours.files), ours)
        for number in range(20):
            messages = [
                message
                for turn in range(number % 4 + 1)
                for message in (
                    {"role": "user", "content": f"a{number} é <b> {turn}"},
                    {"role": "assistant", "content": f" {number} 🙂" * turn + "."},
                )
            ]
            encoded, trained = encode(encoder, Conversation("x", messages), "assistant", datetime(2025, 1, 1))
            expected = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
            assert encoded.ids == expected["input_ids"]
            assert [int(flag) for flag in trained] == expected["assistant_masks"]

    def test_losses_of_twenty_steps_equal_the_reference(self, theirs, tmp_path):
        import datasets
        import torch
        import trl
        from transformers import AutoModelForCausalLM

        folder, tokenizer = theirs
        path = write_conversations(tmp_path, 44)
        steps, rows = 20, 2
        data = Conversations(path=path, sequence_length=256, batch_size=rows, packing=False, eval_batch_size=2)
        recipe = short_recipe(
            "trl",
            TransformerConfig(dropout_rate=0.0),
            data,
            optimizer={
                "learning_rate": 1e-3,
                "warmup_steps": 0,
                "schedule": "constant",
                "weight_decay": 0.0,
                "clip_norm": 1.0,
            },
            training={"steps": steps},
        )
        start = start_from(folder, recipe)
        dataset = prepare(data, start.tokenizer)
        recipe = complete_recipe(recipe, start=start, data=dataset)
        placement = place(recipe)
        state = placement.spread(initialize_from(start, placement.new_state()))
        losses = []
        for step in range(steps):
            batch = dataset._assemble("train", np.arange(step * rows, (step + 1) * rows) % dataset._size("train"))
            state, metrics = placement.train_step(state, batch)
            losses.append(float(metrics["loss_sum"]) / float(metrics["weight"]))

        records = [json.loads(line) for line in Path(path).read_text().splitlines()]
        order = [records[(step * rows + row) % dataset._size("train")] for step in range(steps) for row in range(rows)]
        options = recipe.optimizer
        arguments = trl.SFTConfig(
            output_dir=str(tmp_path / "out"),
            assistant_only_loss=True,
            max_length=257,
            packing=False,
            max_steps=steps,
            per_device_train_batch_size=rows,
            learning_rate=options.learning_rate,
            lr_scheduler_type="constant",
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_epsilon=options.epsilon,
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            train_sampling_strategy="sequential",
        )
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        trainer = trl.SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=datasets.Dataset.from_list(order),
            processing_class=tokenizer,
        )
        trainer.train()
        expected = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        np.testing.assert_allclose(losses, expected, atol=1e-4)
        assert losses[-1] < losses[0] - 0.3
