"""The notebooks are clean as committed, and run from top to bottom in a kernel of this Python, without TensorFlow."""

import json
import os
import re
import shutil
import signal
import threading
import time

import jax
import nbformat
import pytest
import tokenizers
from chat_parts import write_chat_model
from finetune_parts import bert_directory
from nbclient.exceptions import DeadKernelError
from notebook_parts import (
    FINETUNE,
    INSTALL,
    PATHS,
    PRETRAINED,
    ROOT,
    SHARDING,
    TRAINING,
    check,
    code_of,
    execute,
    pictures,
    printed,
    read,
    with_parameters,
)

import transformer
from transformer.config import LearnedOptions, gpt2_decoder

README = (ROOT / "README.md").read_text(encoding="utf-8")
COLAB_PAGE = (ROOT / "docs" / "colab.md").read_text(encoding="utf-8")

# Command-line options for a run with few steps and few pairs.
QUICK = ["--training.steps", "80", "--data.train-examples", "400", "--data.max-digits", "2", "--data.batch-size", "32"]
QUICK += ["--model.num-layers", "1", "--model.d-model", "32", "--model.feed-forward.d-ff", "64"]
QUICK += ["--optimizer.learning-rate", "1e-2"]
QUICK += ["--evaluation.every", "80", "--evaluation.translations", "3"]

every = pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)


@pytest.fixture
def folder(tmp_path):
    """The working directory of the notebook."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    return folder


@every
def test_a_notebook_is_clean(path):
    """A notebook is valid, has no outputs, has named cells, and is formatted like nbformat, which gives short diffs."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert path.read_text(encoding="utf-8") == nbformat.writes(notebook) + "\n"
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), cell.id
        assert len(cell.source.splitlines()) <= 25, cell.id
        if cell.cell_type == "code":
            assert not cell.outputs, cell.id
            assert cell.execution_count is None, cell.id
            assert not re.search(r"import tensorflow\b|from tensorflow\b", cell.source), cell.id
            assert max(map(len, cell.source.splitlines())) <= 120, cell.id
    assert notebook.cells[0].source.startswith("# ")
    assert "REPOSITORY" not in code_of(notebook, "parameters")


@every
def test_links_lead_to_files_and_the_page_of_colab_links_here(path):
    assert f"(../notebooks/{path.name})" in COLAB_PAGE
    text = "\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert (path.parent / target).exists(), target


def test_the_readme_links_to_the_first_notebook():
    assert "(notebooks/colab_tpu.ipynb)" in README


def test_all_notebooks_install_identically():
    for name in (*INSTALL, "install-text"):
        sources = {next(cell.source for cell in read(path).cells if cell.id == name) for path in PATHS}
        assert len(sources) == 1, name


# After training and resuming, metrics.jsonl contains the loss of every step exactly once.
TRAINING_CHECK = """
from transformer.viz._records import read_metrics

lines = read_metrics(workdir / "metrics.jsonl")
assert [line["step"] for line in lines if "train/loss" in line] == list(range(10, again.step + 1, 10)), lines
assert (again.step, again.steps) == (recipe.training.steps + MORE_STEPS, recipe.training.steps + MORE_STEPS)
assert summary.exact_match[""].rate >= 0.99, summary.exact_match
assert again.exact_match[""].rate >= 0.99, again.exact_match
"""


@pytest.mark.slow
def test_the_first_notebook_trains_and_resumes(tmp_path, folder):
    """A short run on numbers of two digits, with a lock left by a machine that disappeared."""
    workdir = folder / "runs" / "number_words"
    workdir.mkdir(parents=True)
    holder = {"pid": os.getpid(), "host": "gone", "started": "boot a tick 1", "since": "2026-01-02 03:04:05 UTC"}
    (workdir / ".lock").write_text(json.dumps(holder))
    notebook = with_parameters(read(TRAINING), CHANGES=QUICK, MORE_STEPS=20, PROMPT="forty-two")
    out = execute(check(notebook, TRAINING_CHECK), tmp_path, folder)
    assert "installing" not in printed(out["versions"])
    assert "1 x cpu" in printed(out["train"])
    assert f"took over {workdir}/.lock from process {os.getpid()} on host gone" in printed(out["train"])
    assert "to step 80" in printed(out["train"])
    assert "from step 80, to step 100" in printed(out["resume"])
    assert printed(out["generate"]) == printed(out["resumed"]) == "cuarenta y dos\n"
    assert [pictures(out[name]) for name in ("curves", "attention", "resumed")] == [1, 1, 1]
    assert "decoder_cross_layer1.png" in printed(out["attention"])


@pytest.mark.slow
def test_the_sharding_notebook_shows_its_documented_results(tmp_path, folder):
    lines = """
assert count == 8
assert len(losses) == 5 and {len(found) for found in losses.values()} == {STEPS}
assert max(largest.values()) < 1e-5, largest
assert 0 < max(largest.values()), "all layouts gave identical losses, so they did not run differently"
assert difference < 1e-5, difference
assert kilobytes["fsdp x 8"] < 0.15 * kilobytes["data x 8"]
assert kilobytes["tensor x 4, data x 2"] < 0.3 * kilobytes["data x 8"]
assert kilobytes["pmap x 8"] == kilobytes["data x 8"] == kilobytes["one device"]
"""
    out = execute(check(with_parameters(read(SHARDING), STEPS=6), lines), tmp_path, folder)
    assert "must multiply to 8" in printed(out["misfit"])
    assert "from step 3, to step 6" in printed(out["second-half"])
    for name, parts, label in (("data", 1, "CPU 0,1,2,3,4,5,6,7"), ("fsdp", 8, "CPU 7"), ("tensor", 4, "CPU 3,7")):
        (shown,) = [output.data["text/html"] for output in out[f"{name}-picture"] if "data" in output]
        assert len(set(re.findall(r"background-color: (#\w+)", shown))) == parts, name
        assert label in shown


def gpt2_directory(folder):
    """Write a tiny byte-level model in the format of GPT-2, with random weights."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)} | {"<|endoftext|>": 256}
    config = gpt2_decoder(
        vocab_size=257, d_model=16, num_layers=2, num_heads=2, position=LearnedOptions(max_length=128)
    )
    model = transformer.CausalLM(config)
    params = model.init(jax.random.key(0), jax.numpy.zeros((1, 1), int))["params"]
    transformer.save(model, params, folder)
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.slow
def test_a_pretrained_model_is_used_and_fine_tuned(tmp_path, folder):
    """Run the notebook twice, as after a disconnect: the second time, the run is already finished."""
    changes = ["--lora.rank", "2", "--lora.targets", "query", "value", "up", "down", "--evaluation.samples", "1"]
    values = {"MODEL": str(gpt2_directory(tmp_path / "gpt2")), "EMBEDDER": str(bert_directory(tmp_path / "bert"))}
    values |= {"SENTENCES": ["a good film", "a good film", "very bad"], "STEPS": 20, "CHANGES": changes}
    lines = """
assert recipe.lora.rank == 2
opened = open_model(MODEL)
assert opened.model.config.d_model == 16
assert abs(similarity[0, 1] - 1) < 1e-5 and abs(similarity[0, 2]) < 0.999, similarity
losses = [line["train/loss"] for line in map(json.loads, open(workdir / "metrics.jsonl")) if "train/loss" in line]
assert len(losses) == 4 and losses[-1] < losses[0], losses
equal = jax.tree.map(lambda a, b: bool((a == b).all()), transformer.load(exported)[1], opened.params)
changed = {"/".join(key.key for key in path) for path, same in jax.tree_util.tree_leaves_with_path(equal) if not same}
assert {path.split("/")[-2] for path in changed} == {"query", "value", "up", "down"}, changed
"""
    notebook = with_parameters(read(PRETRAINED), **values)
    out = execute(check(notebook, f"import json, transformer\n{lines}"), tmp_path, folder)
    assert printed(out["generate"]).startswith("The sea was")
    assert pictures(out["attention"]) == pictures(out["curves"]) == 1
    assert "a good film" in printed(out["embed"])
    assert "to step 20" in printed(out["tune"])
    assert printed(out["compare"]).count("---") == 2
    assert "model.safetensors" in printed(out["export"])
    again = execute(with_parameters(read(PRETRAINED), **values), tmp_path, folder)
    assert "this run is finished" in printed(again["tune"])
    assert printed(again["compare"]) == printed(out["compare"])


@pytest.mark.slow
def test_a_chat_model_is_fine_tuned_and_its_adapter_saved(tmp_path, folder):
    """A tiny random Qwen 3 learns the example's format; the adapter that the notebook saved gives the same answers."""
    model = write_chat_model(tmp_path / "qwen3", "qwen3", model="qwen3")
    changes = ["--lora.rank", "8", "--optimizer.learning-rate", "2e-2", "--model.dtype", "float32"]
    values = {"MODEL": str(model), "STEPS": 60, "NEW_TOKENS": 16, "CHANGES": changes}
    lines = """
from transformer.inference import load
assert len(rows) == 400 and len(held_out) == 8
assert not any(text.startswith('{"sum": ') for text in before), before
assert all(text.startswith('{"sum": ') for text in after), after
assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
trained = open_model(workdir)
assert answers(trained) == after
"""
    out = execute(check(with_parameters(read(FINETUNE), **values), lines), tmp_path, folder)
    assert "0 of 8 answers equal" in printed(out["before"])
    assert "to step 60" in printed(out["tune"])
    assert '[{"sum": ' in printed(out["tune"])
    assert "adapter for Qwen 3" in printed(out["export"])
    assert printed(out["after"]).count("after: ") == 8
    assert pictures(out["curves"]) == 1
    # A file of the user, with the adapter of the first run replaced.
    (folder / "own.jsonl").write_text((folder / "sums.jsonl").read_text().replace("sum", "total"))
    values |= {"DATA": str(folder / "own.jsonl"), "STEPS": 2, "CHANGES": [*changes, "--evaluation.samples", "0"]}
    shutil.rmtree(folder / "runs" / "json_answers")
    again = execute(with_parameters(read(FINETUNE), **values), tmp_path, folder)
    assert "to step 2" in printed(again["tune"])


def mount_drive(tmp_path, folder):
    """Write a module that mounts Google Drive, and return (the path to mount, the workdir of the notebook)."""
    drive = tmp_path / "modules" / "google" / "colab" / "drive.py"
    drive.parent.mkdir(parents=True)
    (drive.parent / "__init__.py").touch()
    drive.write_text(
        "import pathlib\n\ndef mount(path):\n    (pathlib.Path(path) / 'MyDrive').mkdir(parents=True, exist_ok=True)"
    )
    return str(folder / "drive"), folder / "drive" / "MyDrive" / "transformer-zoo" / "number_words"


@pytest.mark.slow
def test_the_committed_notebook_trains(tmp_path, folder):
    """The unchanged notebook, except for the path of the Drive, and for fewer additional steps."""
    place, workdir = mount_drive(tmp_path, folder)
    notebook = with_parameters(read(TRAINING), DRIVE=place, MORE_STEPS=20)
    out = execute(check(notebook, TRAINING_CHECK), tmp_path, folder)
    assert "to step 300" in printed(out["train"])
    assert "from step 300, to step 320" in printed(out["resume"])
    assert printed(out["generate"]) == printed(out["resumed"]) == "setecientos cuarenta y dos\n"
    assert (workdir / "checkpoints" / "320").is_dir()


@pytest.mark.slow
def test_a_disconnected_notebook_resumes(tmp_path, folder):
    """The kernel is killed between two checkpoints, and then all cells run again on a machine with an empty disk."""
    place, workdir = mount_drive(tmp_path, folder)
    changes = [*QUICK, "--checkpoint.every", "20"]
    changes[changes.index("--training.steps") + 1] = changes[changes.index("--evaluation.every") + 1] = "400"
    values = {"DRIVE": place, "CHANGES": changes, "MORE_STEPS": 20, "PROMPT": "forty-two"}

    def disconnect():
        while not (workdir / "checkpoints" / "20").exists():
            time.sleep(0.02)
        holder = json.loads((workdir / ".lock").read_text())
        os.kill(holder["pid"], signal.SIGKILL)
        (workdir / ".lock").write_text(json.dumps(holder | {"host": "gone"}))

    threading.Thread(target=disconnect, daemon=True).start()
    with pytest.raises(DeadKernelError):
        execute(with_parameters(read(TRAINING), **values), tmp_path, folder)
    shutil.rmtree(tmp_path / "tfds")
    out = execute(check(with_parameters(read(TRAINING), **values), TRAINING_CHECK), tmp_path, folder)
    assert "on host gone" in printed(out["train"])
    assert re.search(r"from step [1-9]\d*, to step 400", printed(out["train"]))
    assert "from step 400, to step 420" in printed(out["resume"])
    assert printed(out["generate"]) == printed(out["resumed"]) == "cuarenta y dos\n"
