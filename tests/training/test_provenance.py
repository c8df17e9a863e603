"""A recipe or tokenizer that was changed after training: every command that opens the run rejects it."""

import json
import shutil

import pytest
from training_recipes import change, record_drawn_run, tiny_recipe

import transformer
from transformer.__main__ import main
from transformer.config import SinusoidalOptions, T5BiasOptions
from transformer.data.tokenizers._kinds import TOKENIZERS
from transformer.training._serial import encode
from transformer.training.workdir._provenance import WorkdirError, tokenizer_fingerprint
from transformer.training.workdir._runs import load_run

pytestmark = pytest.mark.cpu_only("computes nothing on a device")


def drawn(folder, **options):
    """A run on numbers with two digits, with checkpoints of steps 3 (the best) and 5."""
    small = {"max_digits": 2, "train_examples": 200, "data_dir": str(folder / "tfds")}
    recipe = change(tiny_recipe("seq2seq", model={"vocab_size": None}), data=small)
    return record_drawn_run(recipe, folder / "run", (3, 5), **options)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return drawn(tmp_path_factory.mktemp("provenance"))


@pytest.fixture
def workdir(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run")


def exchange_words(workdir):
    path = workdir / "tokenizer" / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    words = state["vocabulary"]
    words[0], words[1] = words[1], words[0]
    path.write_text(json.dumps(state), encoding="utf-8")


def edit(workdir, group, **fields):
    path = workdir / "recipe.json"
    values = json.loads(path.read_text())
    values["recipe"][group] |= fields
    path.write_text(json.dumps(values))


COMMANDS = {
    "generate": "generate RUN --prompt five",
    "an older checkpoint": "generate RUN --prompt five --step 3",
    "translate": "translate RUN",
    "evaluate": "evaluate run RUN",
    "inspect": "inspect text RUN --prompt five",
    "score": "score RUN --text five",
    "convert": "convert RUN RUN/out",
    "average": "average RUN --last 2 --to RUN/mean",
    "train --init": "train number_words --init RUN --workdir RUN/next",
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_swapped_vocabulary_entries_are_rejected_by_every_command(workdir, command, capsys):
    exchange_words(workdir)
    assert main([word.replace("RUN", str(workdir)) for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert (
        f"{workdir}/tokenizer was changed: it is not the tokenizer that the checkpoint {workdir}/checkpoints/" in error
    )
    assert "Restore it from a copy, or train in another --workdir." in error


@pytest.mark.parametrize("command", [COMMANDS["generate"], COMMANDS["average"]])
def test_an_edited_recipe_is_rejected_with_a_remedy(workdir, command, capsys):
    before = json.loads((workdir / "recipe.json").read_text())
    edit(workdir, "model", num_heads=1)
    assert main([word.replace("RUN", str(workdir)) for word in command.split()]) == 2
    error = capsys.readouterr().err
    assert f"{workdir}/recipe.json was changed: it differs from the recipe" in error
    assert "in model.num_heads: 3 -> 1. Restore it: cp " in error
    source, target = error.strip().partition("cp ")[2].split()
    shutil.copy(source, target)
    assert json.loads((workdir / "recipe.json").read_text()) == before


def test_python_functions_also_check_the_files(workdir):
    edit(workdir, "model", position=encode(T5BiasOptions()))
    with pytest.raises(WorkdirError, match=r"model.position.*'SinusoidalOptions' -> 'T5BiasOptions'"):
        transformer.load(workdir)
    edit(workdir, "model", position=encode(SinusoidalOptions()))
    exchange_words(workdir)
    with pytest.raises(WorkdirError, match="tokenizer was changed"):
        transformer.load(workdir)


def test_fields_that_may_change_may_be_edited(workdir):
    edit(workdir, "evaluation", samples=1)
    edit(workdir, "data", data_dir="/elsewhere")
    assert load_run(workdir).recipe.evaluation.samples == 1


def test_the_layout_of_the_tokenizer_file_does_not_matter(workdir):
    path = workdir / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")), sort_keys=True))
    assert load_run(workdir).step == 3


def test_the_fingerprint_of_a_tokenizer_stays_between_versions():
    """A different value would make every existing run look changed."""
    tokenizer = TOKENIZERS["char"](["a", "b", "é"])
    assert tokenizer_fingerprint(tokenizer) == "7dbede309197f19c123aab76da91b12584ea5150a0f483f4772923f89e894d2d"
    assert tokenizer_fingerprint(TOKENIZERS["char"](["b", "a", "é"])) != tokenizer_fingerprint(tokenizer)
    assert tokenizer_fingerprint(None) is None
