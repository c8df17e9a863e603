"""Options of data reach the batches: packing, trained messages, date, template, length and masked share."""

import json

import numpy as np
import pytest
from chat_parts import tokenizer

from transformer.data import Conversations, MaskedText, Preferences, TokenizerConfig, prepare
from transformer.data.kinds._prompts import Prompts

CHARACTERS = TokenizerConfig(kind="char")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
DATED = "{{ strftime_now('%Y-%m-%d') }}\n" + TEMPLATE


def said(role, content):
    return {"role": role, "content": content}


TURNS = [said("user", "Hi"), said("assistant", "One."), said("user", "And?"), said("assistant", "Two.")]


@pytest.fixture
def written(tmp_path):
    """Write rows as JSON lines and the templates; return the options that name them."""

    def write(rows, template=TEMPLATE):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (tmp_path / "own.jinja").write_text(template)
        return {"path": str(tmp_path / "rows.jsonl"), "template_path": str(tmp_path / "own.jinja")}

    return write


def conversations(written, template=TEMPLATE, **options):
    given = written([{"messages": TURNS}] * 8, template)
    data = Conversations(**given, batch_size=1, eval_batch_size=1, **{"sequence_length": 200, **options})
    return prepare(data, tokenizer=tokenizer("smollm"))


def first_row(dataset):
    """Return the text of a row, the trained part of it, and the number of its conversations."""
    (batch, *_) = dataset.eval_batches()
    row, inside = batch["targets"][0], batch["weights"][0] > 0
    text = dataset.tokenizer.decode(batch["tokens"][0])
    return text, dataset.tokenizer.decode(row[inside]), text.count("Hi")


def test_conversation_options_reach_the_data(written):
    text, trained, count = first_row(conversations(written, packing=False))
    assert (text.count("One."), trained, count) == (1, "One.Two.", 1)
    assert first_row(conversations(written, packing=False, train_on="last"))[1] == "Two."
    assert "And?" in first_row(conversations(written, packing=False, train_on="everything"))[1]
    short = conversations(written, packing=False, sequence_length=30)
    assert short.eval_batches()[0]["tokens"].shape == (1, 30)
    rows = [len(conversations(written, sequence_length=400, packing=pack)._rows["train"]) for pack in (True, False)]
    assert rows[0] < rows[1]


@pytest.mark.parametrize("date", ["2020-02-03", "2025-01-01"])
def test_the_date_of_the_recipe_reaches_every_chat_data_kind(written, date):
    """Conversations, preferences and prompts."""
    pairs = [{"chosen": TURNS[:2], "rejected": [TURNS[0], said("assistant", f"No {i}.")]} for i in range(4)]
    asked = [{"prompt": [said("user", f"Hi {i}")]} for i in range(4)]
    made = tokenizer("smollm")
    found = [
        conversations(written, DATED, packing=False, date=date),
        prepare(Preferences(**written(pairs, DATED), max_length=90, date=date), tokenizer=made),
        prepare(Prompts(**written(asked, DATED), max_prompt_length=90, date=date), tokenizer=made),
    ]
    for dataset in found:
        tokens = dataset.eval_batches()[0]["tokens"]
        text = dataset.tokenizer.decode(tokens.reshape(-1, tokens.shape[-1])[0])
        assert text.startswith(date), type(dataset)


def test_prompt_column_and_length_reach_the_data(written):
    rows = [{"question": f"Hi {i}"} for i in range(4)]
    path = written(rows)["path"]
    data = {"path": path, "prompt_column": "question", "tokenizer": CHARACTERS}
    dataset = prepare(Prompts(**data, max_prompt_length=9))
    assert dataset.prompts_of("train")[0].prompt == "Hi 0"
    with pytest.raises(ValueError, match="1 to 3 tokens"):
        prepare(Prompts(**data, max_prompt_length=3))


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
def test_the_masked_share_of_the_recipe_reaches_the_data(tmp_path, share):
    (tmp_path / "text.txt").write_text("\n".join(f"a text of {i} words" for i in range(300)))
    data = MaskedText(
        path=str(tmp_path / "text.txt"), mask_share=share, max_length=16, batch_size=128, tokenizer=CHARACTERS
    )
    dataset = prepare(data)
    batch = next(dataset.train_batches(seed=0))
    inside = np.arange(batch["tokens"].shape[1]) < batch["lengths"][:, None]
    found = batch["weights"].sum() / inside.sum()
    assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / inside.sum())
