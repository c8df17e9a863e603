"""Results in docs/results.md: read from workdirs, stored in one file per recipe, and rendered as one page."""

import dataclasses
import json
import shlex
from pathlib import Path

import pytest

from benchmarks.machine import machine
from benchmarks.results import FOLDER, PAGE, abouts, add, command, curve, dump, figures, read, record
from benchmarks.results_page import FIGURES, NOT_RECORDED, page, spread
from transformer.config import ConfigError
from transformer.training._overrides import find_recipe, load_recipe_file, override
from transformer.training._recipe import Origin, save_recipe, with_vocabulary
from transformer.training.lora import LoRA

ROOT = Path(__file__).resolve().parents[2]
RUN = {
    "seed": 0,
    "figures": {"loss": 1.5, "last_loss": 1.75},
    "parameters": 1200,
    "steps": 20,
    "best_step": 10,
    "seconds": 61,
    "date": "2026-01-02",
    "machine": "an abacus",
    "versions": {"jax": "1.2.3"},
    "command": "python train.py configs/known.py",
    "curve": [[10, 1.5], [20, 1.75]],
}
OTHER = RUN | {
    "seed": 1,
    "figures": {"loss": 1.7, "last_loss": 1.7},
    "seconds": 65,
    "command": RUN["command"] + " --training.seed 1",
}
SUMMARY = {
    "step": 20,
    "steps": 20,
    "best_step": 10,
    "parameters": 1200,
    "seconds": 61.4,
    "best_loss": 1.5,
    "eval_loss": 1.75,
}
EVALUATED = [{"step": 10, "eval/loss": 1.5, "eval/accuracy": 0.5, "eval/mae": 0.25}, {"step": 20, "eval/loss": 1.75}]


def recipe_of(name):
    return load_recipe_file(find_recipe(name, ROOT))[0]


def workdir_of(folder, recipe, **summary):
    folder.mkdir(exist_ok=True)
    save_recipe(recipe, folder)
    (folder / "summary.json").write_text(json.dumps(SUMMARY | summary))
    lines = [{"step": 5, "train/loss": 2.0}, *EVALUATED]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_page_equals_the_output_of_the_command():
    """The page contains every recipe of configs/, with results or the reason why there are none."""
    text = PAGE.read_text(encoding="utf-8")
    assert NOT_RECORDED not in text, "run python -m benchmarks.results add WORKDIR, or add the reason as not_trained"
    assert page(read(), abouts()) == text, "run: python -m benchmarks.results"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_stored_run_records_are_complete_and_small(path):
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content.keys() <= {"published", "not_trained", "runs"}
    assert set(content.get("published", {})) in (set(), {"figure", "source"})
    assert path.stat().st_size < 20_000
    for run in content.get("runs", []):
        assert run.keys() >= RUN.keys()
        assert run["figures"].keys() <= FIGURES.keys()
        words = shlex.split(run["command"])
        assert words[:3] == ["python", "train.py", f"configs/{path.stem}.py"]
        options = words[5:] if words[3:4] == ["--init"] else words[3:]
        override(recipe_of(path.stem), options, program="train.py")  # raises an error for invalid options
        assert not any(word.startswith("/") for word in words), "a path of one machine"
    commands = [run["command"] for run in content.get("runs", [])]
    assert len(set(commands)) == len(commands)


def test_a_run_is_recorded_from_its_own_files(tmp_path):
    recipe = with_vocabulary(recipe_of("shakespeare_cpu"), 68)
    training = dataclasses.replace(recipe.training, seed=3, steps=20)
    data = dataclasses.replace(recipe.data, manual_dir="/somewhere", batch_size=7)
    recipe = dataclasses.replace(recipe, training=training, data=data)
    name, run = record(workdir_of(tmp_path, recipe), "an abacus", "in a hurry")
    assert name == "shakespeare_cpu"
    assert run.keys() == RUN.keys() | {"note"}
    same = ("figures", "parameters", "steps", "best_step", "seconds", "machine", "curve")
    assert {field: run[field] for field in same} == {field: RUN[field] for field in same}
    assert (run["seed"], run["note"]) == (3, "in a hurry")
    assert run["versions"].keys() == {"python", "jax", "flax"}
    more = {"split": "test", "baseline": {"loss": 2.0, "accuracy": None, "mae": 0.5}}
    _, run = record(workdir_of(tmp_path, recipe, **more), "an abacus")
    assert (run["split"], run["groups"]) == ("test", {"repeating the last step": "MSE 2.000, MAE 0.500"})
    assert "; measured on test\n" in page({"known": {"runs": [run], "text": ""}}, {"known": "A model."})
    options = "--data.batch-size 7 --training.seed 3 --training.steps 20"
    assert run["command"] == f"python train.py configs/shakespeare_cpu.py {options}"


def test_a_command_names_files_without_folders_and_its_initial_model():
    recipe = recipe_of("text_file")
    recipe = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path="/some/where/my text.txt"))
    assert command(recipe) == "python train.py configs/text_file.py --data.path 'my text.txt'"
    begun = dataclasses.replace(
        recipe_of("text_file"), origin=Origin(source="/far/bert/", model="BERT", fingerprint="0")
    )
    assert command(begun) == "python train.py configs/text_file.py --init bert"
    # d_model belongs to the pretrained model, dropout_rate to the recipe.
    model = begun.model.replace(d_model=256, dropout_rate=0.5)
    tuned = dataclasses.replace(begun, model=model, lora=LoRA(rank=2))
    assert command(tuned).startswith(
        "python train.py configs/text_file.py --init bert --model.dropout-rate 0.5 --lora."
    )
    assert "--lora.rank 2" in command(tuned)
    assert "d-model" not in command(tuned)


@pytest.mark.parametrize(
    ("task", "more", "expected"),
    [
        ("causal_lm", {}, {"loss": 1.5, "last_loss": 1.75}),
        ("seq2seq", {}, {"loss": 1.5, "last_loss": 1.75}),
        (
            "seq2seq",
            {
                "exact_match": {"": {"right": 3, "total": 8}, "2": {"right": 1, "total": 4}},
                "basics": {"right": 1, "total": 2},
            },
            {"exact_match": 37.5, "basics": 50.0},
        ),
        ("seq2seq", {"corpus": {"bleu": 31.25, "chrf": 55.5, "bleu_signature": "x"}}, {"bleu": 31.25, "chrf": 55.5}),
        ("classifier", {}, {"accuracy": 50.0}),
        ("image_classifier", {}, {"accuracy": 50.0}),
        ("masked_lm", {}, {"accuracy": 50.0, "loss": 1.5, "last_loss": 1.75}),
        ("masked_lm", {"held_out": {"loss": 1.25, "accuracy": 0.75, "mae": None}}, {"accuracy": 75.0, "loss": 1.25}),
        ("forecaster", {}, {"mse": 1.5, "mae": 0.25}),
        ("forecaster", {"held_out": {"loss": 1.25, "accuracy": None, "mae": 0.5}}, {"mse": 1.25, "mae": 0.5}),
        ("sft", {"held_out": {"loss": 0.1, "accuracy": 0.9, "others": {"exact_match": 0.75}}}, {"exact_match": 75.0}),
        (
            "dpo",
            {"held_out": {"loss": 0.1, "others": {"prefers_chosen": 0.75, "reference_prefers_chosen": 0.5}}},
            {"prefers_chosen": 75.0, "reference_prefers_chosen": 50.0},
        ),
        ("grpo", {"held_out": {"loss": -0.5, "accuracy": 0.5, "others": {}}}, {"exact_match": 50.0}),
        ("image_classifier", {"held_out": {"loss": 1.25, "accuracy": 0.75, "mae": None}}, {"accuracy": 75.0}),
    ],
)
def test_each_task_reports_its_own_metrics(task, more, expected):
    """Metrics are those of the evaluation with the lowest loss, here the second to last."""
    assert figures(task, SUMMARY | more, EVALUATED) == expected


def test_rejects_directories_without_a_finished_run_of_a_recipe(tmp_path):
    recipe = recipe_of("shakespeare_cpu")
    with pytest.raises(ConfigError, match=r"has trained only 19 of 20 steps. Finish the run first"):
        record(workdir_of(tmp_path, recipe, step=19), "here")
    with pytest.raises(ConfigError, match="'mine'"):
        record(workdir_of(tmp_path, dataclasses.replace(recipe, name="mine")), "here")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match=r"summary.json"):
        record(tmp_path, "here")


def test_curves_are_subsampled_from_the_end():
    lines = [{"step": step, "eval/loss": 1 / step} for step in range(1, 102)]
    kept = curve(lines)
    assert [step for step, _ in kept[-2:]] == [98, 101]
    assert len(kept) == 34
    assert curve(lines[:3]) == [[1, 1.0], [2, 0.5], [3, 0.3333]]


def test_a_run_replaces_an_earlier_run_of_the_same_command(tmp_path):
    (tmp_path / "known.json").write_text(dump({"published": {"figure": "9", "source": "x"}, "not_trained": "no time"}))
    for run in (OTHER, RUN, RUN | {"seconds": 62}):
        path = add("known", run, tmp_path)
    kept = json.loads(path.read_text())
    assert kept == {"published": {"figure": "9", "source": "x"}, "runs": [RUN | {"seconds": 62}, OTHER]}
    assert json.loads(add("new", RUN, tmp_path).read_text()) == {"runs": [RUN]}


def test_the_page_has_mean_spread_and_published_figures():
    published = {"figure": "1.88", "source": "a paper"}
    recipes = {
        "known": {"runs": [RUN, OTHER], "published": published, "text": "A paragraph."},
        "big": {"not_trained": "too big", "text": ""},
    }
    text = page(recipes, {"known": "A model.", "big": "A big model."})
    assert "| [known](#known) | loss, nats: 1.600 ± 0.141 (2 seeds) | 1.88 | 1,200 | 20 | 61 to 65 s |" in text
    assert "| [big](#big) | not trained: too big |" in text
    by_hand = {
        "runs": [RUN | {"figures": {"last_loss": 2.0}}, OTHER],
        "text": "",
    }  # this run has no lowest loss
    assert "| final loss: 1.850 ± 0.212 (2 seeds) |" in page({"known": by_hand}, {"known": "A model."})
    assert "Published: 1.88. Source: a paper." in text
    assert "| 1 | 1.700 | 1.700 | 1,200 | 20 | 65 s |\n| all | 1.600 ± 0.141 | 1.725 ± 0.035 |  |  |  |" in text
    assert "- seed 0, 1: `python train.py configs/known.py`: 2026-01-02, an abacus, jax 1.2.3\n" in text
    assert (
        text.endswith("A paragraph.\n\n## big\n\nA big model.\n\nNot trained: too big.\n") or "A paragraph.\n" in text
    )
    assert "| [new](#new) | not trained: no run recorded yet |" in page(recipes, {"known": "", "big": "", "new": ""})
    with pytest.raises(ConfigError, match=r"big.json"):
        page(recipes, {"known": ""})


def test_spread_is_the_sample_s_standard_deviation():
    assert spread([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert spread([1.0]) == "1.000"


def test_describes_the_machine_in_words():
    assert " cores of " in machine()
    assert machine().endswith(" GiB")
