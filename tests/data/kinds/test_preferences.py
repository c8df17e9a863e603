"""Preferences: which tokens count, prompts as texts and messages, and rows that are refused."""

import json

import numpy as np
import pytest

from transformer.data import Example, Preferences, TokenizerConfig

CHARACTERS = TokenizerConfig(kind="char")


def said(role, content):
    return {"role": role, "content": content}


def written(folder, rows, name="pairs.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def prepared(folder, rows, **options):
    data = Preferences(
        path=written(folder, rows), **{"max_length": 32, "batch_size": 2, "tokenizer": CHARACTERS, **options}
    )
    return data.prepare()


def trained(dataset, batch, row):
    """Return the texts of the trained targets of both responses, without special tokens."""
    targets, weights = batch["targets"][row], batch["weights"][row] > 0
    return [dataset.tokenizer.decode(ids[inside]) for ids, inside in zip(targets, weights, strict=True)]


TEXTS = [{"prompt": f"is {i} odd?", "chosen": f" yes {i}", "rejected": " no"} for i in range(4)]
CHATS = [
    {
        "chosen": [said("user", f"is {i} odd?"), said("assistant", f"yes {i}")],
        "rejected": [said("user", f"is {i} odd?"), said("assistant", "no")],
    }
    for i in range(4)
]


def test_only_responses_and_their_end_tokens_are_trained(tmp_path):
    dataset = prepared(tmp_path, TEXTS)
    batch = dataset._assemble("train", np.array([2, 0]))
    assert batch["tokens"].shape == batch["targets"].shape == batch["weights"].shape == (2, 2, 32)
    assert [trained(dataset, batch, row) for row in (0, 1)] == [[" yes 2", " no"], [" yes 0", " no"]]
    whole = dataset.tokenizer.decode(batch["tokens"][0, 0])
    assert whole == "is 2 odd? yes 2"
    np.testing.assert_array_equal(batch["tokens"][..., 1:], batch["targets"][..., :-1])
    ends = [batch["targets"][0, i][batch["weights"][0, i] > 0][-1] for i in (0, 1)]
    assert ends == [dataset.tokenizer.eos_id] * 2


def test_messages_and_texts_train_the_same_tokens(tmp_path):
    pytest.importorskip("jinja2")
    dataset = prepared(tmp_path, CHATS)
    batch = dataset._assemble("train", np.array([1, 2]))
    assert [trained(dataset, batch, row) for row in (0, 1)] == [["yes 1", "no"], ["yes 2", "no"]]
    assert dataset.prompts() == ["is 3 odd?"]
    assert dataset.examples() == [Example("is 3 odd?", "yes 3")]
    first = {"prompt": [said("user", "is 0 odd?")], "chosen": [said("assistant", "yes 0")]}
    separate = [first | {"rejected": [said("assistant", "no")]}, *CHATS[1:]]
    again = prepared(tmp_path, separate)
    for name, array in dataset._assemble("train", np.arange(3)).items():
        np.testing.assert_array_equal(array, again._assemble("train", np.arange(3))[name])
    assert dataset.fingerprint == again.fingerprint


def test_a_missing_prompt_is_the_common_prefix(tmp_path):
    rows = [{"chosen": row["prompt"] + row["chosen"], "rejected": row["prompt"] + row["rejected"]} for row in TEXTS]
    dataset = prepared(tmp_path, rows)
    assert trained(dataset, dataset._assemble("train", np.array([1])), 0) == ["yes 1", "no"]
    assert dataset.prompts() == ["is 3 odd? "]


@pytest.mark.parametrize(
    ("prompt", "before"),
    [
        ([said("system", "s"), said("user", "q")], []),  # TRL's form: the responses begin with a message in common
        ([said("system", "s"), said("user", "q")], [said("system", "s"), said("user", "q")]),  # they repeat it
        ("q", []),
        ("q", [said("user", "q")]),
        ("q", [said("system", "s"), said("user", "q")]),
        (None, [said("system", "s"), said("user", "q")]),
    ],
)
def test_no_message_of_the_prompt_is_lost_or_written_twice(tmp_path, prompt, before):
    same = [said("assistant", "same"), said("user", "again")]
    row = {name: [*before, *same, said("assistant", text)] for name, text in (("chosen", "yes"), ("rejected", "no"))}
    row |= {} if prompt is None else {"prompt": prompt}
    (found,) = Preferences(path=written(tmp_path, [row, row]), validation_share=0.5).read()["train"]
    system = [said("system", "s")] if isinstance(prompt, list) or len(before) == 2 else []
    for response, text in ((found.chosen, "yes"), (found.rejected, "no")):
        assert response.messages == [*system, said("user", "q"), *same, said("assistant", text)]
    assert found.chosen.given == found.rejected.given > 0


def test_long_responses_are_truncated_and_long_prompts_left_out(tmp_path):
    rows = [*TEXTS, {"prompt": "is 1 odd? " * 9, "chosen": " yes", "rejected": " no"}]
    dataset = prepared(tmp_path, [rows[-1], *rows[:-1]], max_length=13)
    assert "1 pairs left out" in dataset.describe()
    assert "4 responses truncated" in dataset.describe()
    assert dataset._size("train") == 3
    for batch in dataset.eval_batches():
        assert (batch["weights"].sum(-1) > 0)[: len(batch["weights"]) // 16 or 1].all()
    with pytest.raises(ValueError, match=r"--data.max-length"):
        prepared(tmp_path, TEXTS, max_length=4)
    late = {"prompt": "is 1 odd?", "chosen": " yes" * 9 + "!", "rejected": " yes" * 9 + "?"}
    with pytest.raises(ValueError, match=r"13 tokens.*both are the same.*--data.max-length"):
        prepared(tmp_path, [late] * 4, max_length=13)


GOOD = TEXTS[0]
ASKED = said("user", "a")
BOTH = {"chosen": [said("assistant", "a")], "rejected": [said("assistant", "b")]}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"chosen": " no", "rejected": " no"}, "line 2: chosen and rejected are equal"),
        ({"prompt": "  "}, "line 2: the text of prompt is empty"),
        ({"chosen": ""}, "line 2: the text of chosen is empty"),
        ({"rejected": None}, r"2.*got 'prompt'.*'chosen'"),
        ({"prompt": None}, r"2.*\(without"),
        ({"rejected": 3}, "line 2: rejected must be a text like chosen, got 3"),
        ({"prompt": ["a"]}, "line 2: prompt must be a text like chosen"),
        ({"chosen": [], "rejected": []}, r"line 2: chosen must be a list of messages, got \[\]"),
        ({"prompt": None} | BOTH, "line 2: the prompt is empty"),
        ({"prompt": "a", "chosen": [ASKED, *BOTH["chosen"]], "rejected": [ASKED]}, "rejected has no message after"),
        ({"chosen": [ASKED], "rejected": [ASKED]}, "line 2: chosen and rejected are equal"),
        (BOTH, "line 2 has messages, and .* line 3 has texts"),
    ],
)  # fmt: skip
def test_an_invalid_row_is_rejected_with_file_and_line(tmp_path, bad, message):
    rows = [GOOD, GOOD | bad, GOOD]
    with pytest.raises(ValueError, match=message) as error:
        prepared(tmp_path, rows)
    assert "pairs.jsonl" in str(error.value)


def test_messages_without_a_trained_response_are_refused(tmp_path):
    pytest.importorskip("jinja2")
    bad = {"chosen": [said("user", "a"), said("user", "b")], "rejected": [said("user", "a"), said("user", "c")]}
    with pytest.raises(ValueError, match=r"pairs.jsonl.*1"):
        prepared(tmp_path, [bad, *CHATS])


def test_tokens_that_hide_the_difference_are_refused(tmp_path):
    rows = [{"prompt": "a", "chosen": " yes  no", "rejected": " yes no"}, *TEXTS]
    with pytest.raises(ValueError, match="line 1: the tokenizer or the chat template has the same tokens"):
        prepared(tmp_path, rows, tokenizer=TokenizerConfig(kind="word"))


def test_the_held_out_split_of_a_saved_folder_is_used(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    for split, rows in (("train", TEXTS[:3]), ("test", TEXTS[3:])):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
        table = pyarrow.Table.from_pylist(rows)
        with pyarrow.ipc.new_stream(str(folder / "data.arrow"), table.schema) as out:
            out.write_table(table)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    saved = str(tmp_path / "saved")
    for places in ({"path": saved}, {"path": written(tmp_path, TEXTS[:3]), "validation_path": saved}):
        found = Preferences(**places).read()
        assert {split: [one.prompt for one in rows] for split, rows in found.items()} == {
            "train": [row["prompt"] for row in TEXTS[:3]],
            "validation": [TEXTS[3]["prompt"]],
        }


def test_an_arrow_file_and_a_parquet_file_have_the_same_data(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(TEXTS)
    parquet.write_table(table, tmp_path / "pairs.parquet")
    with pyarrow.OSFile(str(tmp_path / "pairs.arrow"), "wb") as file, pyarrow.ipc.new_file(file, table.schema) as out:
        out.write_table(table)
    expected = prepared(tmp_path, TEXTS).fingerprint
    for name in ("pairs.parquet", "pairs.arrow"):
        data = Preferences(path=str(tmp_path / name), max_length=32, batch_size=2, tokenizer=CHARACTERS)
        assert data.prepare().fingerprint == expected
