"""Long inputs and long steps are announced before the work that prints nothing."""

import pytest
from training_recipes import change, text_recipe

from transformer.cli import _texts as texts
from transformer.training import _loop as loop


@pytest.mark.parametrize(("size", "noted"), [(texts.LONG - 1, False), (texts.LONG, True)])
def test_warns_about_a_long_prompt_before_loading_the_model(size, noted, capsys):
    prompts = texts.read_prompts(["short", "x" * size], lines=False)
    assert [len(prompt) for prompt in prompts] == [5, size]
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"note: the longest input has {size:,} characters") == noted
    assert len(printed.err.splitlines()) == noted


def test_warns_about_a_long_training_step(tmp_path):
    recipe = text_recipe(tmp_path)
    assert loop._long_step_note(recipe) == ""
    count = loop.MANY_MICRO_BATCHES
    long = change(recipe, training={"accumulation": count}, data={"batch_size": 3 * count})
    assert loop._long_step_note(long).startswith(f"note: a step computes {count:,} micro-batches of 3 rows")
