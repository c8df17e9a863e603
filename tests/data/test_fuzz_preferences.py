"""Fuzz tests of preferences and prompts: arbitrary rows give valid batches, or a ValueError that names the file."""

import json
from pathlib import Path

import pytest
from fuzz_parts import BYTE_EDITS, JSON_EDITS, Fuzz, cleared, damaged, fuzz, rewritten, written
from hypothesis import strategies as st

from transformer.data import Preferences, Prompts, TokenizerConfig, prepare

__all__ = ["fuzz"]  # a fixture

QUESTION = [{"role": "user", "content": "Hi"}]
CHOSEN, REJECTED = ([*QUESTION, {"role": "assistant", "content": text}] for text in ("One.", "Two <eos>"))
PREFERENCES = [
    {"prompt": "is it?", "chosen": " no", "rejected": " yes"},
    {"chosen": "it is even", "rejected": "it is odd"},
    {"chosen": CHOSEN, "rejected": REJECTED},
    {"prompt": QUESTION, "chosen": CHOSEN[1:], "rejected": REJECTED[1:], "chat_template_kwargs": {"brief": True}},
]
PROMPTS = [
    {"prompt": "write a", "letter": "a", "answer": "aaa"},
    {"prompt": QUESTION, "answer": 3},
    {"prompt": CHOSEN, "number": 7.5, "nested": {"a": [1]}},
]


@pytest.mark.parametrize(
    ("kind", "rows", "config"),
    [("preferences", PREFERENCES, Preferences), ("prompts", PROMPTS, Prompts)],
    ids=["preferences", "prompts"],
)
def test_fuzzed_preference_rows(kind, rows, config, fuzz: Fuzz):
    """Half of the files have texts, and half have messages; a file with both is an error for preferences."""

    def put(folder: Path, case: tuple) -> None:
        first, lines = case
        (cleared(folder) / "a.jsonl").write_bytes(b"\n".join([json.dumps(first).encode(), *lines]))

    def read(folder: Path, case: tuple) -> None:
        data = config(path=str(folder / "a.jsonl"), tokenizer=TokenizerConfig(kind="byte"), eval_batch_size=2)
        batch = prepare(data).eval_batches()[0]
        assert batch["weights"].any()

    drawn = st.sampled_from(rows)
    changed = st.builds(lambda row, edits: written(rewritten(row, edits)), drawn, JSON_EDITS)
    broken = st.builds(lambda row, edits: damaged(written(row), edits), drawn, BYTE_EDITS)
    lines = st.lists(changed | broken, min_size=1, max_size=2)
    fuzz(kind, 500, st.tuples(drawn, lines), read, put=put)
