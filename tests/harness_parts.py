"""Tasks of lm-evaluation-harness as local YAML files, and tiny models with and without a start token."""

import json

from chat_parts import write_chat_model

QUESTIONS = [
    {"question": "Hello world", "choices": ["A", "B", "C", "D"], "answer": 1, "text": "The answer is 4. " * 3},
    {"question": "how are you today? ", "choices": [" you", " the answer is", "4"], "answer": 0, "text": "é 🙂\nend"},
    {"question": "turn of " * 12, "choices": ["end", "system user"], "answer": 1, "text": "Hello world, how"},
    {"question": "tool", "choices": ["<|im_start|>", "model", "model "], "answer": 2, "text": "system user tool\n" * 9},
    {"question": "", "choices": ["The", "Hello world"], "answer": 0, "text": "a"},
]
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "last_word": {
        "output_type": "loglikelihood",
        "doc_to_target": " {{choices[answer]}}",
        "metric_list": [{"metric": "perplexity"}, {"metric": "acc"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "text",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "Question: {{question}}",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["st", "\n\n"], "do_sample": False, "max_gen_toks": 11},
        "metric_list": [{"metric": "exact_match"}],
    },
    "long_answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}:",
        "doc_to_target": "text",
        "generation_kwargs": {"max_gen_toks": 37},
        "metric_list": [{"metric": "exact_match"}],
    },
}
# Name of a model: (family of its tokenizer, whether the tokenizer adds a start token).
MODELS = {"bytes_with_start": ("llama3", True), "pieces": ("mistral", True), "bytes_without_start": ("qwen2", False)}


def write_tasks(directory):
    """Write the tasks and their data, and return the directory."""
    rows = directory / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    for name, task in TASKS.items():
        common = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(rows)}},
            "test_split": "test",
            "fewshot_split": "test",
            "doc_to_text": "{{question}}",
            "target_delimiter": "",
        }
        (directory / f"{name}.yaml").write_text(json.dumps(common | task))  # JSON is YAML
    return directory


def write_model(directory, name, *, context=48, seed=100):
    """Write a model of `MODELS` with a context length, and return the directory."""
    family, adds_start = MODELS[name]
    write_chat_model(directory, family, seed=seed)
    (directory / "integrity.json").unlink(missing_ok=True)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    if adds_start:
        settings = json.loads((directory / "tokenizer_config.json").read_text())
        content = json.loads((directory / "tokenizer.json").read_text())
        start = settings["bos_token"]
        (number,) = (entry["id"] for entry in content["added_tokens"] if entry["content"] == start)
        first, second = {"SpecialToken": {"id": start, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
        content["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [first, second],
            "pair": [first, second, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {start: {"id": start, "ids": [number], "tokens": [start]}},
        }
        (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory
