"""Fine-tuning: labeled texts, runs that are initialized from a pretrained model (full or LoRA), and their results."""

import dataclasses
import functools
import json
import shutil

import chex
import jax
import numpy as np
import pytest
from finetune_parts import SMALL_LORA, bert_directory, finetuning, write_sst2
from flax.traverse_util import flatten_dict, unflatten_dict
from golden import case as golden_case
from golden import ours
from numeric_parts import random_params
from training_recipes import change, text_recipe

from transformer.__main__ import main
from transformer.config import ConfigError
from transformer.data import SST2, LabeledText, TokenizerConfig, load_tokenizer, prepare
from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer
from transformer.inference import classify, export, open_model, start_from
from transformer.nn._masks import Mask
from transformer.nn._sharding import ParallelConfig
from transformer.nn.models import CausalLM, Classifier
from transformer.training._loop import train
from transformer.training._parallel import place
from transformer.training._recipe import from_json, load_recipe, to_json
from transformer.training._start import Start, check_options, describe_start, initialize_from
from transformer.training._state import abstract_state, initial_params
from transformer.training.workdir._checkpoint import Checkpointer
from transformer.training.workdir._runs import WorkdirError, load_run, load_updates, open_run
from transformer.zoo import load_pretrained
from transformer.zoo._adapters import adapter_for
from transformer.zoo.families import ENTRIES
from transformer.zoo.weights._files import WeightFiles, write_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with weights, `bert`, and texts, `sst2`."""
    folder = tmp_path_factory.mktemp("finetune")
    bert_directory(folder / "bert")
    write_sst2(folder / "sst2")
    return folder


@functools.cache
def read_start(folder, recipe):
    """Return the pretrained model that a recipe starts from, which is read once for several tests."""
    return start_from(folder / "bert", recipe)


@pytest.fixture(scope="module")
def adapted(folder):
    """A complete LoRA run."""
    recipe = finetuning(folder / "sst2", lora=SMALL_LORA)
    train(recipe, folder / "adapted", start=read_start(folder, recipe))
    return folder / "adapted"


# Labeled texts


def labeled(tmp_path, text, **fields):
    path = tmp_path / "texts.tsv"
    path.write_text(text)
    return LabeledText(path=str(path), **({"tokenizer": TokenizerConfig(kind="byte")} | fields))


def test_a_batch_has_tokens_lengths_and_one_class_per_row(folder):
    tokenizer = load_pretrained_tokenizer(folder / "bert", 13)
    dataset = prepare(SST2(manual_dir=str(folder / "sst2"), batch_size=5, eval_batch_size=7), tokenizer=tokenizer)
    assert (dataset.task, dataset.labels, dataset.splits) == (
        "classifier",
        ("negative", "positive"),
        ("train", "validation"),
    )
    first, _, last = dataset.eval_batches()
    assert {name: array.shape for name, array in first.items()} == {
        "tokens": (7, dataset.longest),
        **dict.fromkeys(("lengths", "targets", "weights"), (7,)),
    }
    text = dataset.examples("validation")[0]
    assert (text.source, text.target) == ("bad", "negative")
    assert first["tokens"][0, : first["lengths"][0]].tolist() == [2, 6, 3]
    assert last["weights"].tolist() == [1, 1, 0, 0, 0, 0, 0]
    assert next(dataset.train_batches(0))["tokens"].shape == (5, dataset.longest)
    assert next(dataset.train_batches(0, lambda total: np.array([1, 3])))["targets"].shape == (2,)
    assert dataset.describe().startswith("sst2: 48 train, 16 validation texts of 2 classes (negative, positive)")


def test_a_long_text_is_truncated_before_its_last_token(folder):
    tokenizer = load_pretrained_tokenizer(folder / "bert", 13)
    dataset = prepare(SST2(manual_dir=str(folder / "sst2"), max_length=3), tokenizer=tokenizer)
    batch = dataset.eval_batches()[0]
    assert batch["tokens"].shape[1] == 3
    assert set(batch["tokens"][:, 0]) == {2}
    assert set(batch["tokens"][:, 2]) == {3}
    assert "texts truncated" in dataset.describe()


def test_labels_follow_the_order_of_the_training_file(tmp_path):
    rows = "id\tlabel\tsentence\n1\twet\train\n2\tdry\tdesert\n\n3\twet\tsea\n4\tdry\tsand\n"
    dataset = prepare(labeled(tmp_path, rows, validation_share=0.4, hold_out="end"))
    assert dataset.labels == ("dry", "wet")
    assert [(e.source, e.target) for e in dataset.examples("train")] == [("rain", "wet"), ("desert", "dry")]
    named = prepare(labeled(tmp_path, rows, validation_share=0.4, hold_out="end", labels=("wet", "dry")))
    assert named.eval_batches()[0]["targets"][:2].tolist() == [0, 1]
    assert named.fingerprint != dataset.fingerprint
    other = labeled(tmp_path, rows, validation_path=str(tmp_path / "texts.tsv"), max_length=5)
    assert prepare(other).longest == 5


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("text\tlabel\na\tb\n", {}, r"'sentence'.*'text'.*'label'"),
        ("sentence\tlabel\na\n", {}, "line 2: expected 2 columns as in the first line, with a sentence and a label"),
        ("sentence\tlabel\na\t \n", {}, "line 2: the column 'label' is empty"),
        ("sentence\tlabel\n", {}, "has only a first line"),
        ("sentence\tlabel\na\tx\nb\tx\n", {}, "only the label 'x'"),
        ("sentence\tlabel\na\tx\nb\ty\n", {"labels": ("x", "z")}, "has the label 'y': expected x, z"),
    ],
)
def test_an_invalid_labeled_text_file_is_an_error_with_its_line(tmp_path, text, fields, message):
    with pytest.raises(ValueError, match=message):
        prepare(labeled(tmp_path, text, **fields))


def test_missing_sst2_files_name_their_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"SST-2.*SST-2\.zip.*--data.manual-dir FOLDER"):
        prepare(SST2())
    write_sst2(tmp_path)
    (tmp_path / "dev.tsv").unlink()
    with pytest.raises(FileNotFoundError, match=r"dev\.tsv.*train\.tsv.*dev\.tsv"):
        prepare(SST2(manual_dir=str(tmp_path)))


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (LabeledText, {"path": "x", "labels": ("one",)}, r"labels.*got 'one'"),
        (LabeledText, {"path": "x", "labels": ("a", "a")}, "different names, got 'a', 'a'"),
        (LabeledText, {"path": "x", "text_column": "label"}, r"got 'label'.*'label'"),
        (LabeledText, {"path": "x", "max_length": 1}, r"max_length.*2.*got 1"),
        (SST2, {"labels": ("a", "b", "c")}, r"labels.*0.*1.*got 3"),
    ],
)
def test_invalid_labeled_data_names_the_field_to_change(kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


def test_a_pretrained_tokenizer_is_the_same_from_a_workdir(folder, tmp_path):
    """Also if only config.json defines them: the end token, and the start token of a decoder."""
    source = tmp_path / "source"
    shutil.copytree(folder / "bert", source)
    (source / "config.json").write_text('{"eos_token_id": 3, "decoder_start_token_id": 4, "hidden_size": 12}')
    tokenizer = load_pretrained_tokenizer(source, 17)
    tokenizer.save_alone(tmp_path / "alone")
    again = load_tokenizer(tmp_path / "alone")
    assert again.state() == tokenizer.state()
    assert (again.vocab_size, again.eos_id, again.begin_id, again.pad_id) == (17, 3, 4, 0)
    assert again.encode_model("a good film") == tokenizer.encode_model("a good film")
    (tmp_path / "alone" / "config.json").write_text('{"vocab_size": "many"}')
    with pytest.raises(ValueError, match="expected an integer above 0"):
        load_tokenizer(tmp_path / "alone")


# Initialization from a pretrained model


def opened_run(folder, recipe, workdir="nowhere", start=None):
    start = read_start(folder, recipe) if start is None else start
    return open_run(recipe, folder / workdir, say=print, start=start)[0], start


def test_existing_parameters_are_loaded_and_a_new_head_initialized(folder):
    recipe, start = opened_run(folder, finetuning(folder / "sst2"))
    assert recipe.model.replace(dropout_rate=0.1) == start.config.replace(
        **{"output.num_classes": 2, "attention.dropout_rate": 0.0}
    )
    assert (recipe.model.dropout_rate, recipe.model.vocab_size, recipe.data.labels) == (0.05, 13, SST2().labels)
    placement = place(recipe)
    new = placement.new_state()
    state = initialize_from(start, new)
    before, after, given = (flatten_dict(of, sep="/") for of in (new.params, state.params, start.params))
    theirs = flatten_dict(load_pretrained(folder / "bert").params, sep="/")
    head = ("head_transform/dense/bias", "head_transform/dense/kernel", "output/bias", "output/kernel")
    assert recipe.origin.new == head
    assert given.keys() == after.keys() - set(head)
    for path, leaf in after.items():
        np.testing.assert_array_equal(leaf, before[path] if path in head else theirs[path])
        assert leaf.sharding == before[path].sharding
    line = describe_start(recipe, start)
    assert f"from {folder / 'bert'} (BERT, BertForMaskedLM): " in line
    assert f"182 new: {', '.join(head)}; not used: head_transform/dense/bias, " in line


@pytest.mark.programs(8, reason="reads and exports models, whose example inputs and keys are made outside of jax.jit")
def test_a_pooler_in_the_files_is_loaded(folder, tmp_path):
    """Like the published BERT: the architecture is BertForMaskedLM, and there is a pooler."""
    recipe = finetuning(folder / "sst2")
    model = Classifier(read_start(folder, recipe).config)
    params = random_params(model, jax.device_put(np.zeros((1, 1), np.int32)))["params"]
    export(_opened(model, params, folder), tmp_path / "out")
    found = start_from(tmp_path / "out", recipe)
    chex.assert_trees_all_equal(found.params, params)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["architectures"] = ["BertModel"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    (tmp_path / "out" / "integrity.json").unlink()
    found = start_from(tmp_path / "out", recipe)
    chex.assert_trees_all_equal(found.params, params)
    assert found.left == ()  # the pooler of the BertModel is the classifier's transform


def _opened(model, params, folder):
    opened = open_model(folder / "bert")
    return dataclasses.replace(opened, model=model, params=params)


def test_parameters_loaded_onto_a_mesh_are_sharded(folder):
    """fsdp 2 x tensor 1 over two of the simulated devices; the moving average is initialized too."""
    recipe = finetuning(folder / "sst2", parallel=ParallelConfig(devices=2, data=1, fsdp=2), lora=SMALL_LORA)
    recipe = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, ema_decay=0.9))
    recipe, start = opened_run(folder, recipe)
    placement = place(recipe)
    state = initialize_from(start, placement.new_state())
    wanted = placement.abstract_state()
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == jax.tree.map(lambda leaf: leaf.sharding, wanted)
    chex.assert_trees_all_equal(jax.device_get(state.base), jax.device_get(start.params))
    chex.assert_trees_all_equal(jax.device_get(state.ema), jax.device_get(state.params))
    assert not state.base["embedding"]["embedding"].is_fully_replicated


def test_rejects_parameters_that_do_not_fit(folder, tmp_path):
    recipe = finetuning(folder / "sst2")
    start = read_start(folder, recipe)
    params = start.params | {"output": {"kernel": np.zeros((12, 3)), "bias": np.zeros(3)}}
    three = dataclasses.replace(start, params=params)
    with pytest.raises(ConfigError, match=r"output/bias.*\(3,\).*\(2,\)"):
        opened_run(folder, recipe, start=three)
    empty = Start("a", "b", start.config, {"other": {"kernel": np.zeros(2)}}, start.tokenizer)
    with pytest.raises(ConfigError, match="has no parameter of the recipe's model"):
        opened_run(folder, recipe, start=empty)
    with pytest.raises(ConfigError, match=r"MaskedLM.*CausalLM"):
        start_from(folder / "bert", text_recipe(tmp_path))
    with pytest.raises(ConfigError, match=r"num_classes.*3.*2"):
        opened_run(folder, dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": 3})))
    with pytest.raises(ConfigError, match=r"--model.num-layers"):
        check_options(recipe, dataclasses.replace(recipe, model=recipe.model.replace(num_layers=3)), "x")
    check_options(recipe, dataclasses.replace(recipe, model=recipe.model.replace(dropout_rate=0.3)), "x")
    with pytest.raises(ConfigError, match="lora updates a pretrained model, but none was given"):
        open_run(finetuning(folder / "sst2", lora=SMALL_LORA), tmp_path / "none", say=print)


def test_a_classifier_infers_its_number_of_classes(folder):
    recipe = finetuning(folder / "sst2")
    open_, _ = opened_run(
        folder, dataclasses.replace(recipe, model=recipe.model.replace(**{"output.num_classes": None}))
    )
    assert open_.model.output.num_classes == 2
    assert from_json(to_json(open_)) == open_


@pytest.mark.slow
def test_a_language_model_starts_from_a_run(tmp_path):
    """A language model, initialized from the workdir of another run: its first loss is the last one of that run."""
    recipe = text_recipe(tmp_path)
    train(recipe, tmp_path / "first")
    again = dataclasses.replace(recipe, name="again", training=dataclasses.replace(recipe.training, steps=4))
    start = start_from(tmp_path / "first", again)
    assert start.model.startswith("CausalLM, step ")
    train(again, tmp_path / "second", start=start)
    assert isinstance(load_run(tmp_path / "second").model, CausalLM)
    assert load_recipe(tmp_path / "second").origin.new == ()
    assert load_tokenizer(tmp_path / "second" / "tokenizer").state() == start.tokenizer.state()


# Complete runs


MERGED = "opening a run with low-rank updates merges each kernel outside of jax.jit"


@pytest.mark.programs(12, reason=MERGED)
def test_a_lora_run_learns_and_is_self_contained(adapted, capsys):
    recipe = load_recipe(adapted)
    assert recipe.origin.model == "BERT, BertForMaskedLM"
    summary = json.loads((adapted / "summary.json").read_text())
    assert summary["eval_accuracy"] > 0.85
    assert summary["eval_loss"] < 0.5
    run = load_run(adapted)
    assert jax.tree.map(np.shape, run.params) == jax.tree.map(np.shape, jax.eval_shape(lambda: initial_params(recipe)))
    good, bad = classify(open_model(adapted), ["good film", "bad film"])
    assert good.label == "positive"
    assert good.probabilities["positive"] > bad.probabilities["positive"] + 0.2
    assert main(["classify", "text", str(adapted), "--text", "good film"]) == 0
    assert capsys.readouterr().out.startswith("positive\t0.")
    assert main(["evaluate", "run", str(adapted), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["accuracy"] == summary["eval_accuracy"]
    assert main(["generate", str(adapted), "--prompt", "very good"]) == 2
    assert "contains a model of type Classifier." in capsys.readouterr().err


def logits_of(model, params):
    """Return the logits of a text of four tokens, and one token of padding."""

    def logits(params, tokens, lengths):
        return model.apply({"params": params}, tokens, mask=Mask.lengths(lengths))

    return jax.jit(logits)(params, np.int32([[2, 5, 7, 3, 0]]), np.int32([4]))


@pytest.mark.programs(18, reason=MERGED)
def test_a_converted_lora_run_gives_the_same_logits_with_merged_weights(adapted, tmp_path, capsys):
    assert main(["convert", str(adapted), str(tmp_path / "out")]) == 0
    assert "BERT: Devlin" in capsys.readouterr().out
    loaded, run = load_pretrained(tmp_path / "out"), load_run(adapted)
    assert loaded.fields["id2label"] == {"0": "negative", "1": "positive"}
    ours, theirs = (logits_of(one.model, one.params) for one in (run, loaded))
    np.testing.assert_array_equal(ours, theirs)
    assert loaded.tokenizer.state() == run.tokenizer.state()


@pytest.mark.programs(17, reason=MERGED)
def test_only_the_updates_of_a_run_are_exported(adapted, tmp_path, capsys):
    """The adapter and the frozen parameters give the logits of the run; a family is never replaced by another."""
    out = tmp_path / "adapter"
    assert main(["adapter", str(adapted), str(out), "--family", "nonsense"]) == 2
    assert "unknown family 'nonsense'" in capsys.readouterr().err
    assert main(["adapter", str(adapted), str(out)]) == 0
    assert capsys.readouterr().out.startswith("adapter for BERT\n")
    _, model, trained, base = load_updates(adapted)
    # The parameters that are not in the pretrained weights, such as the classifier, come from the adapter.
    base = unflatten_dict(flatten_dict(base) | jax.tree.map(np.zeros_like, flatten_dict(trained["new"])))
    adapter = adapter_for(model, base, out, ENTRIES["bert"], "BertForSequenceClassification")
    ours, theirs = (logits_of(model, params) for params in (load_run(adapted).params, adapter.applied_to(base)))
    np.testing.assert_allclose(theirs, ours, atol=1e-5)  # the updates are added to activations instead of weights


def test_rejects_a_different_initial_model_but_accepts_a_moved_one(adapted, folder, tmp_path, capsys):
    recipe = finetuning(folder / "sst2", lora=SMALL_LORA)
    start = read_start(folder, recipe)
    moved = Start("elsewhere", start.model, start.config, start.params, start.tokenizer, start.left)
    open_run(recipe, adapted, say=print, start=moved)
    assert "changed since the previous training run: origin.source: " in capsys.readouterr().out
    other = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, start.params)
    changed = Start(start.source, start.model, start.config, other, start.tokenizer)
    with pytest.raises(WorkdirError, match=r"origin\.fingerprint"):
        open_run(recipe, adapted, say=print, start=changed)
    with pytest.raises(WorkdirError, match=r"differs from this command in .*lora"):
        open_run(finetuning(folder / "sst2"), adapted, say=print)
    (tmp_path / "begun").mkdir()
    shutil.copy(adapted / "recipe.json", tmp_path / "begun")
    with pytest.raises(WorkdirError, match="--init"):
        open_run(recipe, tmp_path / "begun", say=print)


def final_state(workdir, step):
    with Checkpointer(workdir) as checkpoints:
        restored = checkpoints.restore_newest(abstract_state(load_recipe(workdir)))
    assert restored.step == step
    return jax.device_get(restored.state)


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(adapted, folder):
    """Stopped after ten of thirty steps, and resumed without --init."""
    recipe = finetuning(folder / "sst2", lora=SMALL_LORA)
    short = dataclasses.replace(recipe.training, steps=10)
    start = read_start(folder, recipe)
    train(dataclasses.replace(recipe, training=short), folder / "stopped", start=start)
    train(recipe, folder / "stopped")
    chex.assert_trees_all_equal(final_state(folder / "stopped", 30), final_state(adapted, 30))


@pytest.mark.slow
def test_full_fine_tuning_learns(folder):
    recipe = finetuning(folder / "sst2")
    summary = train(recipe, folder / "whole", start=read_start(folder, recipe))
    assert summary.eval_accuracy == 1.0
    assert (folder / "whole" / "metrics.jsonl").read_text().count("eval/accuracy") == 3
    assert not (folder / "whole" / "samples.txt").exists()


def test_a_tied_table_named_as_the_head_is_loaded(tmp_path):
    """Like safetensors.torch.save_model: a tensor with several names is stored under the first one."""
    record = golden_case.golden("gpt2")["lm"]
    directory = ours.write(tmp_path / "gpt2", record)
    files = WeightFiles(directory)
    tensors = {name: files.read(name) for name in files.tensors}
    (table,) = [name for name in tensors if name.endswith("wte.weight")]
    tensors["lm_head.weight"] = tensors.pop(table)
    write_weights(tmp_path / "other", files.config, tensors)
    recipe = finetuning(tmp_path)
    given, other = (start_from(tmp_path / name, recipe).params for name in ("gpt2", "other"))
    jax.tree.map(np.testing.assert_array_equal, given, other)


def test_a_classifier_keeps_float32_values_outside_the_float16_range(tmp_path):
    directory = ours.write(tmp_path / "deepseek", golden_case.golden("deepseek_v3")["lm"])
    recipe = change(finetuning(tmp_path), model={"dtype": "bfloat16", "parameters.dtype": "bfloat16"})
    leaves = flatten_dict(start_from(directory, recipe).params, sep="/")
    types = {path.rpartition("/")[2]: str(leaf.dtype) for path, leaf in leaves.items()}
    assert (types["selection_bias"], types["kernel"]) == ("float32", "bfloat16")
