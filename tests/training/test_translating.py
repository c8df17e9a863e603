"""BLEU and chrF: equal to sacreBLEU, at the end of a run and by `evaluate`; and the files that are written."""

import dataclasses
import json
from pathlib import Path

import pytest
import sacrebleu
from training_recipes import change, evaluation_of, record_drawn_run

from transformer.__main__ import main
from transformer.config import ConfigError, Execution, FeedForwardOptions, TransformerConfig
from transformer.data import Multi30k, NumberWords, ParallelText, TokenizerConfig, prepare
from transformer.data._dataset import Example
from transformer.generate import Beam
from transformer.nn._sharding import ParallelConfig
from transformer.training import EvaluationConfig, LoggingConfig, OptimizerConfig, Recipe, TrainingConfig
from transformer.training import _loop as loop
from transformer.training.metrics._summary import Summary, read_summary, render, save_summary
from transformer.training.metrics._writer import read_metrics
from transformer.training.tasks._table import TASKS
from transformer.training.tasks._translation import Translation, corpus_score, make_beam, translate, write_lines
from transformer.training.workdir._runs import load_run

RIGHT = ["ein mann geht .", "zwei hunde laufen im schnee .", "eine frau liest ein buch ."]


def translations(outputs, right=RIGHT):
    return [Translation(Example("s", target), output) for target, output in zip(right, outputs, strict=True)]


# The measures


def test_identical_texts_have_the_maximum_score():
    score = corpus_score(translations(RIGHT), "none")
    assert (score.bleu, score.chrf) == (pytest.approx(100), pytest.approx(100))
    assert score.pairs == 3
    assert corpus_score(translations(["", "", ""]), "none").bleu == 0


@pytest.mark.parametrize("tokenization", ["none", "13a"])
def test_scores_equal_sacrebleu(tokenization):
    outputs = ["ein mann rennt.", "zwei hunde laufen im wald .", "eine frau liest das buch ."]
    score = corpus_score(translations(outputs), tokenization)
    assert score.bleu == sacrebleu.corpus_bleu(outputs, [RIGHT], tokenize=tokenization).score
    assert score.chrf == sacrebleu.corpus_chrf(outputs, [RIGHT]).score
    assert f"|tok:{tokenization}|" in score.bleu_signature
    assert f"version:{sacrebleu.__version__}" in score.chrf_signature


def test_the_data_determine_the_word_tokenization():
    assert Multi30k(form="tokenized").bleu_tokenization == "none"
    assert Multi30k(form="raw").bleu_tokenization == "13a"
    assert ParallelText(source_path="a").bleu_tokenization == "13a"
    assert NumberWords().bleu_tokenization is None


def test_empty_translations_have_no_score():
    with pytest.raises(ValueError, match="there are no translations to score"):
        corpus_score([], "none")


def test_a_two_line_text_is_written_and_scored_as_one_line(tmp_path):
    outputs = ["ein mann\ngeht .", *RIGHT[1:]]
    write_lines(tmp_path / "out.txt", outputs)
    assert (tmp_path / "out.txt").read_text().splitlines() == RIGHT
    assert corpus_score(translations(outputs), "none").bleu == pytest.approx(100)
    assert [path.name for path in tmp_path.iterdir()] == ["out.txt"]


# A run


def copying(folder):
    """A copy task with sentences of different lengths."""
    words = "abcdefg"
    lines = [" ".join(words[(i * k + i) % 7] for k in range(2 + i % 7)) + ("" if i % 3 else " .") for i in range(60)]
    (folder / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines))
    return Recipe(
        name="copied",
        model=TransformerConfig(d_model=16, num_heads=2, num_layers=1, feed_forward=FeedForwardOptions(d_ff=16)),
        data=ParallelText(
            source_path=str(folder / "pairs.tsv"),
            validation_share=0.2,
            batch_size=24,
            eval_batch_size=5,
            tokenizer=TokenizerConfig(kind="word"),
        ),
        execution=Execution(scan=False),
        parallel=ParallelConfig(devices=1),
        optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=5),
        training=TrainingConfig(steps=60),
        evaluation=EvaluationConfig(every=None, samples=0, translations=2),
        logging=LoggingConfig(tensorboard=False, progress="none"),
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """A run without training, and the output at its end."""
    folder = tmp_path_factory.mktemp("copied")
    workdir = record_drawn_run(copying(folder), folder / "run", (60,), seed=7)
    run = load_run(workdir)
    dataset = prepare(run.recipe.data, tokenizer=run.tokenizer)
    summary = Summary(name="copied", workdir=str(workdir), command="", task="seq2seq", step=60, steps=60)
    results = TASKS["seq2seq"].report(evaluation_of(run.recipe, run.model, run.params, dataset), workdir)
    summary = dataclasses.replace(summary, **vars(results))
    save_summary(summary, workdir)
    return workdir, summary


def test_reports_bleu_and_chrf_at_the_end_of_a_run(copied):
    workdir, summary = copied
    assert summary.corpus.pairs == 12
    assert 0 < summary.corpus.bleu < 100
    assert summary.exact_match == {}
    assert summary.split == "validation"
    assert read_summary(workdir) == summary
    screen = render(summary)
    assert f"BLEU on 12 pairs of validation: {summary.corpus.bleu:.2f}   (nrefs:1|case:mixed|eff:no|tok:13a" in screen
    assert f"chrF on 12 pairs of validation: {summary.corpus.chrf:.2f}   (nrefs:1|case:mixed|eff:yes|nc:6" in screen
    assert (summary.measures["eval/bleu"], summary.measures["eval/chrf"]) == (summary.corpus.bleu, summary.corpus.chrf)


@pytest.mark.slow
def test_the_final_summary_has_bleu_and_chrf(tmp_path, capsys):
    summary = loop.train(copying(tmp_path), tmp_path / "run")
    assert 5 < summary.corpus.bleu < 100
    assert f"BLEU on 12 pairs of validation: {summary.corpus.bleu:.2f}" in capsys.readouterr().out
    assert read_summary(tmp_path / "run") == summary
    last = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "eval/bleu" in line]
    assert [(line["eval/bleu"], line["eval/chrf"]) for line in last] == [(summary.corpus.bleu, summary.corpus.chrf)]
    found = evaluated(capsys, tmp_path / "run")
    assert (found["bleu"], found["chrf"]) == (summary.corpus.bleu, summary.corpus.chrf)


def test_summaries_of_earlier_versions_are_read(copied, tmp_path):
    workdir, summary = copied
    values = json.loads((workdir / "summary.json").read_text())
    del values["corpus"], values["split"]
    (tmp_path / "summary.json").write_text(json.dumps(values))
    expected = dataclasses.replace(
        summary, corpus=None, split="", workdir=str(tmp_path)
    )  # the new location of the file
    assert read_summary(tmp_path) == expected


def evaluated(capsys, *words):
    code = main(["evaluate", "run", *map(str, words), "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return json.loads(out)


def test_evaluate_gives_the_same_scores_and_writes_the_compared_texts(copied, capsys):
    workdir, summary = copied
    found = evaluated(capsys, workdir)
    assert (found["bleu"], found["chrf"]) == (summary.corpus.bleu, summary.corpus.chrf)
    assert found["bleu_signature"] == summary.corpus.bleu_signature
    assert found["same_data"]
    hypotheses = Path(found["hypotheses"]).read_text().splitlines()
    references = Path(found["references"]).read_text().splitlines()
    assert Path(found["hypotheses"]) == workdir / "hypotheses.validation.txt"
    run = load_run(workdir)
    examples = prepare(run.recipe.data, tokenizer=run.tokenizer).examples("validation")
    assert references == [example.target for example in examples]
    assert sacrebleu.corpus_bleu(hypotheses, [references]).score == found["bleu"]
    assert sacrebleu.corpus_chrf(hypotheses, [references]).score == found["chrf"]


def test_evaluate_prints_the_scores(copied, capsys):
    workdir, summary = copied
    assert main(["evaluate", "run", str(workdir)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        *summary.corpus.lines("validation"),
        f"hypotheses: {workdir / 'hypotheses.validation.txt'}",
        f"references: {workdir / 'references.validation.txt'}",
    ]


def test_the_order_of_the_data_is_kept(copied):
    """The translation of a source does not depend on the other sources in its batch."""
    run = load_run(copied[0])
    sources = [example.source for example in prepare(run.recipe.data, tokenizer=run.tokenizer).examples()]
    assert len({len(source) for source in sources}) > 3
    given = run.model, run.params, run.tokenizer
    together = translate(*given, sources, max_new_tokens=9, batch_size=5)
    assert together == [translate(*given, 5 * [source], max_new_tokens=9)[0] for source in sources]
    assert len(set(together)) > 3
    assert translate(*given, sources, max_new_tokens=9, should_stop=lambda: True) is None


@pytest.mark.slow
def test_a_requested_beam_size_is_used(copied, capsys):
    """Set by an option or in the recipe."""
    workdir, narrow = copied
    wide = evaluated(capsys, workdir, "--beam-size", 3, "--alpha", 0)
    assert wide["beam"] == {"size": 3, "alpha": 0}
    run = load_run(workdir)
    recipe = change(run.recipe, evaluation={"beam_size": 3, "beam_alpha": 0.0})
    dataset = prepare(recipe.data, tokenizer=run.tokenizer)
    summary = TASKS["seq2seq"].report(evaluation_of(recipe, run.model, run.params, dataset), workdir)
    assert summary.corpus.chrf == wide["chrf"] != narrow.corpus.chrf


def test_evaluates_with_several_beam_sizes(copied, capsys):
    assert make_beam(1, 0.6) is None
    assert make_beam(3, 0.5) == Beam(size=3, alpha=0.5)
    with pytest.raises(ConfigError, match=r"evaluation\.beam_size.*1.*got 0"):
        EvaluationConfig(beam_size=0)
    with pytest.raises(ConfigError, match=r"evaluation\.beam_alpha.*0.*got -1"):
        EvaluationConfig(beam_alpha=-1.0)
    assert main(["evaluate", "run", str(copied[0]), "--beam-size", "0"]) == 2
    assert "size must be an integer of at least 1, got 0" in capsys.readouterr().err
    assert main(["evaluate", "run", str(copied[0]), "--beam-size", "1", "--alpha", "1"]) == 2
    assert "--alpha is the length penalty of beam search, but the beam size is 1" in capsys.readouterr().err


@pytest.mark.filterwarnings("default:the data differs from")
def test_reports_data_different_from_training(copied, tmp_path, capsys):
    workdir, _ = copied
    for name in ("tokenizer", "checkpoints"):
        (tmp_path / name).symlink_to(workdir / name)
    recipe = json.loads((workdir / "recipe.json").read_text())
    lines = Path(recipe["recipe"]["data"]["source_path"]).read_text().splitlines(keepends=True)
    (tmp_path / "other.tsv").write_text("".join(lines[::-1]))
    recipe["recipe"]["data"]["source_path"] = str(tmp_path / "other.tsv")
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    assert main(["evaluate", "run", str(tmp_path), "--json", "--examples", "0"]) == 0
    out, err = capsys.readouterr()
    assert "the data differs from the training data of" in err
    found = json.loads(out)
    assert not found["same_data"]
    assert "bleu" not in found


@pytest.mark.filterwarnings("default:the translations could not be written")
def test_reports_unwritable_files_and_keeps_the_scores(copied, capsys, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer.training.tasks._translation.write_lines", full)
    found = evaluated(capsys, copied[0])
    assert found["hypotheses"] is None
    assert found["bleu"] == copied[1].corpus.bleu
