"""Fuzz tests of conversations: arbitrary rows and tables give valid batches, or a ValueError that names the file."""

import io
import json
from pathlib import Path

import pytest
from fuzz_parts import BYTE_EDITS, JSON_EDITS, Fuzz, cleared, damaged, files_of, fuzz, rewritten, written
from hypothesis import strategies as st

from transformer.data import Conversations, TokenizerConfig, prepare
from transformer.data.files._records import read_records

__all__ = ["fuzz"]  # a fixture

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TURNS = [{"role": "user", "content": "Hi <eos>"}, {"role": "assistant", "content": "One."}]
ROWS = [
    {"messages": TURNS},
    {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *TURNS, *TURNS]},
    {
        "messages": [TURNS[0], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": {"a": 1}}],
        "tools": [CALL],
    },
    {"messages": {"role": ["user", "assistant"], "content": ["a", "b"]}, "chat_template_kwargs": {"brief": True}},
    {"prompt": "a", "completion": "b"},
    {"prompt": TURNS[:1], "completion": TURNS[1:]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
]
LINES = st.builds(lambda row, edits: written(rewritten(row, edits)), st.sampled_from(ROWS), JSON_EDITS) | st.builds(
    lambda row, edits: damaged(written(row), edits), st.sampled_from(ROWS), BYTE_EDITS
)


def test_fuzzed_conversation_rows(fuzz: Fuzz):
    def put(folder: Path, lines: list[bytes]) -> None:
        (cleared(folder) / "a.jsonl").write_bytes(b"\n".join([json.dumps(ROWS[0]).encode(), *lines]))

    def read(folder: Path, lines: list[bytes]) -> None:
        config = Conversations(
            path=str(folder / "a.jsonl"), sequence_length=64, tokenizer=TokenizerConfig(kind="byte"), eval_batch_size=2
        )
        batch = prepare(config).eval_batches()[0]
        assert batch["weights"].any()

    fuzz("conversations", 1000, st.lists(LINES, min_size=1, max_size=2), read, put=put)


def test_fuzzed_conversation_tables(fuzz: Fuzz):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist([{"messages": TURNS, "number": i} for i in range(9)])
    files = {}
    for name in ("a.parquet", "a.arrow", "data.arrow"):
        sink = io.BytesIO()
        if name == "a.parquet":
            parquet.write_table(table, sink)
        else:
            with (pyarrow.ipc.new_file if name == "a.arrow" else pyarrow.ipc.new_stream)(sink, table.schema) as writer:
                writer.write_table(table)
        files[name] = sink.getvalue()

    def put(folder: Path, case: tuple) -> None:
        name, edits, state = case
        cleared(folder)
        (folder / name).write_bytes(damaged(files[name], edits))
        (folder / "state.json").write_bytes(state)

    def read(folder: Path, case: tuple) -> None:
        read_records(str(folder if case[0] == "data.arrow" else folder / case[0]))

    state = files_of([{"_data_files": [{"filename": "data.arrow"}], "_split": "train"}])
    fuzz("conversations", 2000, st.tuples(st.sampled_from(list(files)), BYTE_EDITS, state), read, put=put)
