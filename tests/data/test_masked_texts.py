"""Masked language models: which tokens are masked, resuming, and initializing a classifier from one."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from finetune_parts import write_tokenizer
from training_recipes import assert_equals_resumed_run, change, short_recipe

from transformer.config import ConfigError, FeedForwardOptions, OutputOptions, TransformerConfig
from transformer.data import LabeledText, MaskedText, TokenizerConfig, load_tokenizer, prepare
from transformer.data._masked_texts import hide
from transformer.data.tokenizers._export import as_pretrained
from transformer.data.tokenizers._kinds import build_tokenizer
from transformer.data.tokenizers._pretrained import load_pretrained_tokenizer
from transformer.inference import classify, open_model, start_from
from transformer.nn.models import Classifier, MaskedLM
from transformer.training._loop import train
from transformer.training._recipe import from_json, load_recipe, to_json
from transformer.training.workdir._runs import load_run

WORDS = ["the", "a", "good", "bad", "film", "very", "not", "quite"]
WORD = TokenizerConfig(kind="word", vocab_size=40)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return 40 lines of 1 to 6 words; only the last 4, which are held out, contain a certain word."""
    random = np.random.default_rng(1)
    lines = [" ".join(random.choice(WORDS, 1 + number % 6)) for number in range(36)]
    path = tmp_path_factory.mktemp("masked") / "lines.txt"
    path.write_text("\n".join([*lines, "", *[f"a zebra {word}" for word in WORDS[:4]]]) + "\n")
    return str(path)


def masked(path, **fields):
    settings = {"mask_share": 0.4, "batch_size": 7, "eval_batch_size": 3, "max_length": 8, "tokenizer": WORD}
    return MaskedText(path=path, **(settings | fields))


def test_mask_shares_match_bert_within_binomial_bounds():
    """15 % are selected: 80 % of these are masked, 10 % replaced by a uniformly random token, 10 % unchanged."""
    random, ids = np.random.default_rng(0), np.arange(10, 30)
    tokens = random.choice(ids, (400, 500)).astype(np.int32)
    may_hide = random.random(tokens.shape) < 0.9
    read, chosen = hide(tokens, may_hide, random.random((*tokens.shape, 3)), 0.15, 4, ids)

    def near(count, of, share):
        assert abs(count - of * share) < 4.5 * np.sqrt(of * share * (1 - share)), (count, of, share)

    near(chosen.sum(), may_hide.sum(), 0.15)
    assert not chosen[~may_hide].any()
    np.testing.assert_array_equal(read[~chosen], tokens[~chosen])
    here, was = read[chosen], tokens[chosen]
    near((here == 4).sum(), here.size, 0.8)
    near((here == was).sum(), here.size, 0.1 + 0.1 / len(ids))
    replaced = here[(here != 4) & (here != was)]
    for token in ids:
        near((replaced == token).sum(), replaced.size, 1 / len(ids))


def test_only_chosen_tokens_that_are_not_special_are_targets(tmp_path):
    """A pretrained tokenizer adds special tokens around a text, and one word is unknown to it."""
    write_tokenizer(tmp_path)
    lines = tmp_path / "lines.txt"
    lines.write_text("\n".join(["the film is good", "very bad films", "not a good film"] * 20))
    tokenizer = load_pretrained_tokenizer(tmp_path, 17)  # embedding rows without a token are never used
    dataset = prepare(masked(str(lines), batch_size=60, mask_share=0.9), tokenizer=tokenizer)
    special, written = [0, 1, 2, 3, 4], set()
    batches = dataset.train_batches(seed=3)
    for batch in [*(next(batches) for _ in range(9)), *dataset.eval_batches()]:
        counts, inside = batch["weights"] > 0, np.arange(dataset.longest) < batch["lengths"][:, None]
        assert not np.isin(batch["targets"][counts], special).any()
        assert not counts[~inside].any()
        np.testing.assert_array_equal(batch["tokens"][~counts], batch["targets"][~counts])
        written |= set(batch["tokens"][counts].tolist())
        firsts, lasts = batch["tokens"][:, 0], batch["tokens"][np.arange(len(counts)), batch["lengths"] - 1]
        assert (set(firsts), set(lasts)) == ({2}, {3})
    assert written == {4, *range(5, 13)}
    assert 1 in dataset.eval_batches()[0]["tokens"], "the unknown word is in the input, but not a target"


def test_masks_are_redrawn_and_depend_only_on_seed_and_position(path):
    dataset = prepare(masked(path))

    def first(count, seed=0, state=None, rows=None):
        iterator = dataset.train_batches(seed, rows)
        if state is not None:
            iterator.set_state({"next_index": state})
        return [next(iterator) for _ in range(count)]

    batches = first(18)
    chex.assert_trees_all_equal(batches, first(18))
    chex.assert_trees_all_equal(batches[11:], first(7, state=11))
    chex.assert_trees_all_equal(
        [{name: array[[1, 4]] for name, array in batch.items()} for batch in batches],
        first(18, rows=lambda total: np.array([1, 4])),
    )
    assert any((a["weights"] != b["weights"]).any() for a, b in zip(batches, first(18, seed=1), strict=True))
    seen = {}
    for batch in batches:
        for text, chosen in zip(batch["targets"].tolist(), batch["weights"].tolist(), strict=True):
            seen.setdefault(tuple(text), set()).add(tuple(chosen))
    assert sum(len(kinds) > 1 for kinds in seen.values()) > len(seen) / 2

    def rows_of(size):
        batches = prepare(masked(path, eval_batch_size=size)).eval_batches()
        return [np.concatenate([batch[name] for batch in batches])[:4] for name in ("tokens", "weights")]

    chex.assert_trees_all_equal(rows_of(2), rows_of(5))


def test_held_out_lines_add_no_word_or_row_to_training(path):
    dataset = prepare(masked(path))
    assert "zebra" not in dataset.tokenizer.vocabulary
    assert (dataset.splits, dataset._size("train"), dataset._size("validation")) == (("train", "validation"), 36, 4)
    assert ["zebra" in text for text in dataset.prompts()] == [True] * 3
    assert dataset.describe().startswith(
        "masked_text: 36 train rows (126 tokens), 4 validation rows (12 tokens), up to 6"
    )


def test_only_requested_batches_are_created(path, monkeypatch):
    dataset, made = prepare(masked(path)), []
    monkeypatch.setattr(dataset, "_assemble", lambda *a, of=dataset._assemble: made.append(a) or of(*a))
    whole = dataset.eval_batches()
    chex.assert_trees_all_equal(dataset.eval_batches(limit=1), whole[:1])
    assert len(made) == len(whole) + 1 > 2


def test_a_long_text_becomes_several_rows(path, tmp_path):
    long = prepare(masked(path, max_length=4))
    assert long._size("train") == 36 + 12  # lines of five and of six words
    assert sum(batch["lengths"][:7].sum() for batch in long.eval_batches("train")[:16]) == 126
    write_tokenizer(tmp_path)
    theirs = prepare(masked(path, max_length=4), tokenizer=load_pretrained_tokenizer(tmp_path, 13))
    rows = theirs.eval_batches("train")[0]["targets"]
    assert set(rows[:, 0]) == {2}
    assert all(row[row > 0][-1] == 3 for row in rows)
    with pytest.raises(ValueError, match=r"max_length \(2\).*1"):
        prepare(masked(path, max_length=2), tokenizer=load_pretrained_tokenizer(tmp_path, 13))


@pytest.mark.parametrize("config", [TokenizerConfig(kind=kind) for kind in ("char", "byte", "word")] + [WORD])
def test_a_mask_token_has_an_id_and_no_spelling(config, tmp_path):
    plain = build_tokenizer(config, ["a <mask> b"])
    tokenizer = build_tokenizer(config, ["a <mask> b"], masked=True)
    assert (plain.mask_id, tokenizer.mask_id) == (None, 4 if tokenizer.unk_id else 3)
    assert tokenizer.tokens([tokenizer.mask_id]) == ["<mask>"]
    assert tokenizer.mask_id not in tokenizer.encode("a <mask> b")
    assert tokenizer.decode([tokenizer.mask_id, *tokenizer.encode("a <mask> b")]) == "a <mask> b"
    assert tokenizer.text_ids == list(range(tokenizer.mask_id + 1, tokenizer.vocab_size))
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).state() == tokenizer.state()
    # A file of the tokenizers library; no text contains the name of the token as a word.
    assert as_pretrained(build_tokenizer(config, ["a b"], masked=True)).mask_id == tokenizer.mask_id
    if config.vocab_size is None:
        assert tokenizer.vocab_size == plain.vocab_size + 1
    file = tmp_path / "tokenizer.json"
    state = json.loads(file.read_text())
    file.write_text(json.dumps(state | {"special_tokens": state["special_tokens"][::-1]}))
    with pytest.raises(ValueError, match=r"special_tokens.*\(then <unk>.*<mask>\)"):
        load_tokenizer(tmp_path)


def test_bpe_counts_its_mask_token():
    tokenizer = build_tokenizer(TokenizerConfig(kind="bpe", vocab_size=262), ["to be or not to be"] * 3, masked=True)
    assert (tokenizer.vocab_size, tokenizer.mask_id) == (262, 3)
    assert tokenizer.decode(tokenizer.encode("not to be")) == "not to be"


def test_invalid_masked_data_names_the_field_to_change(path):
    for fields, message in [
        ({"path": ""}, "path must be a file name, got ''"),
        ({"mask_share": 1.0}, "mask_share must be above 0 and below 1, got 1.0"),
        ({"tokenizer": TokenizerConfig(kind="bpe", vocab_size=259)}, "must be at least 260, because the mask token"),
        ({"tokenizer": TokenizerConfig(kind="word", vocab_size=5)}, "must be at least 6, because the mask token"),
    ]:
        with pytest.raises(ConfigError, match=message):
            masked(**({"path": path} | fields))
    with pytest.raises(ValueError, match="the word tokenizer has no mask token\\. Initialize"):
        prepare(masked(path), tokenizer=build_tokenizer(WORD, ["a b"]))


# Whole runs


def filling_in(path, **groups):
    """Return a recipe of twelve steps with everything that must be restored when a run is resumed."""
    recipe = short_recipe(
        "tiny",
        TransformerConfig(
            d_model=6, num_heads=3, num_layers=1, feed_forward=FeedForwardOptions(d_ff=5), dropout_rate=0.2
        ),
        masked(path),
        optimizer={"warmup_steps": 2, "learning_rate": 3e-2, "decay_steps": 12},
        training={"steps": 12},
        evaluation={"every": 6},
        checkpoint={"every": 4},
        logging={"every": 4},
    )
    return change(recipe, **groups)


@pytest.fixture(scope="module")
def run(path, tmp_path_factory):
    """Folder of a finished run."""
    workdir = tmp_path_factory.mktemp("run") / "mlm"
    train(filling_in(path), workdir)
    return workdir


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_run(run, path, tmp_path):
    assert_equals_resumed_run(run, filling_in(path), 4, tmp_path / "stopped")
    losses = [json.loads(line).get("eval/loss") for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]


def test_a_masked_run_reports_its_task(run):
    recipe = load_recipe(run)
    assert from_json(to_json(recipe)) == recipe
    assert (recipe.task, type(load_run(run).model)) == ("masked_lm", MaskedLM)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["split"] == "validation"
    dataset = prepare(recipe.data, load_run(run).tokenizer)
    assert summary["held_out"]["targets"] == sum(batch["weights"].sum() for batch in dataset.eval_batches())
    assert not (run / "samples.txt").exists()


@pytest.mark.slow
def test_a_classifier_starts_from_a_masked_run(run, path, tmp_path):
    """It gets the parameters below the head and the tokenizer of the model; pooling comes from the recipe."""
    rows = "\n".join(f"the film\t{i % 2}\na good film\t1\nbad\t0" for i in range(6))
    (tmp_path / "texts.tsv").write_text(f"sentence\tlabel\n{rows}\n")
    base = filling_in(path, training={"steps": 2})
    data = LabeledText(path=str(tmp_path / "texts.tsv"), batch_size=4, eval_batch_size=4)
    recipe = dataclasses.replace(
        base, model=TransformerConfig(output=OutputOptions(pooling="first"), dropout_rate=0.1), data=data
    )
    start = start_from(run, recipe)
    theirs = load_run(run)
    assert start.left == ()
    assert start.model.startswith("MaskedLM, step ")
    chex.assert_trees_all_equal(start.params, theirs.params)
    train(recipe, tmp_path / "classifier", start=start)
    ours = load_run(tmp_path / "classifier")
    assert isinstance(ours.model, Classifier)
    assert (ours.model.config.output.pooling, ours.model.config.output.num_classes, ours.model.config.dropout_rate) == (
        "first",
        2,
        0.1,
    )
    assert ours.tokenizer.state() == theirs.tokenizer.state()
    assert load_recipe(tmp_path / "classifier").origin.new == ("output/bias", "output/kernel")
    opened = open_model(tmp_path / "classifier")
    assert opened.context == data.max_length, "the length in training, even without a position table"
    assert classify(opened, ["a good film"])[0].label in "01"


@pytest.mark.slow
def test_the_masked_language_head_is_dropped(path, tmp_path):
    """The masked language model has an output layer of its own, whose shape differs from that of the classifier."""
    recipe = filling_in(path, model={"embedding.tie": False, "parameters.use_bias": True}, training={"steps": 1})
    train(recipe, tmp_path / "untied")
    wanted = dataclasses.replace(recipe, data=LabeledText(path="texts.tsv"))
    start = start_from(tmp_path / "untied", wanted)
    assert start.left == ("output/kernel",)
    assert "output" not in start.params
