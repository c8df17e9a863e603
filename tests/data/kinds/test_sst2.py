"""The sentences of SST-2 prepared by TFDS, and a bag-of-words baseline."""

import numpy as np
import pytest

from benchmarks import bag_of_words
from transformer.config import ConfigError
from transformer.data import MaskedSST2, SST2Sentences, TokenizerConfig, prepare
from transformer.training.tasks._evaluation import EvalLoss
from transformer.training.tasks._table import TASKS
from transformer.training.workdir._journal import TrainStats

WORD = TokenizerConfig(kind="word", vocab_size=8000)


@pytest.fixture(scope="module")
def prepared(test_data, tmp_path_factory):
    """A folder in which the builder of this package prepared local files."""
    folder = {"data_dir": str(tmp_path_factory.mktemp("tfds")), "manual_dir": str(test_data / "data" / "manual")}
    return folder, prepare(SST2Sentences(tokenizer=WORD, **folder))


def test_reads_all_sentences_with_their_labels(test_data, prepared):
    _, dataset = prepared
    assert dataset.splits == ("train", "validation", "test")
    for split, name, size in (("train", "train", 6920), ("validation", "dev", 872), ("test", "test", 1821)):
        lines = (test_data / "data" / "manual" / f"sst2_{name}.tsv").read_text(encoding="utf-8").splitlines()
        examples = [(example.source, example.target) for example in dataset.examples(split)]
        names = {"0": "negative", "1": "positive"}
        assert sorted(examples) == sorted((text, names[label]) for text, label in (line.split("\t") for line in lines))
        assert len(examples) == size


def test_held_out_sentences_add_no_word_to_the_vocabulary(prepared):
    folder, dataset = prepared
    seen = {word for example in dataset.examples("train") for word in example.source.split()}
    assert set(dataset.tokenizer.vocabulary) <= seen
    masked = prepare(MaskedSST2(tokenizer=WORD, **folder))
    assert masked.tokenizer.vocabulary == dataset.tokenizer.vocabulary[:-1], "the mask token uses one id"
    assert (masked.splits, masked._size("train")) == (dataset.splits, 6920)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"sst2_train\.tsv.*sst2_train\.tsv \(720,259"):
        prepare(SST2Sentences(data_dir=str(tmp_path / "tfds"), manual_dir=str(tmp_path)))
    with pytest.raises(ConfigError, match=r"labels.*0.*1.*got 3"):
        SST2Sentences(labels=("a", "b", "c"))


def rows(count, seed):
    """Return texts of random words, of which one ("bad" or "good") determines the class."""
    random = np.random.default_rng(seed)
    texts = []
    for _ in range(count):
        label = int(random.integers(2))
        words = [*random.choice(["a", "b", "c", "d"], 4), ("bad", "good")[label]]
        texts.append((" ".join(random.permutation(words)), label))
    return texts


@pytest.mark.parametrize("tf_idf", [False, True])
def test_a_bag_of_words_learns_words_that_predict_the_class(tf_idf):
    splits = {"train": rows(200, 0), "validation": rows(50, 1), "test": rows(70, 2)}
    result = bag_of_words.best(splits, pairs=True, tf_idf=tf_idf)
    assert (result.validation, result.test) == (1.0, 1.0)
    assert 6 < result.features <= 6 + 36
    assert result.strength in bag_of_words.STRENGTHS


def test_the_fitted_weights_have_zero_gradient():
    """A larger penalty gives a smaller weight norm; the intercept is not penalized."""
    texts, labels = zip(*rows(60, 3), strict=True)
    features, labels = bag_of_words.Features(texts, pairs=False, tf_idf=False), np.array(labels)
    table = features(["a a b", "zebra"])
    assert (len(features), table.toarray().sum(1).tolist()) == (6, [3.0, 0.0])
    table, signs = features(texts), 2 * labels - 1
    found = {c: bag_of_words.fit(table, labels, c) for c in (0.1, 10.0)}
    for c, weights in found.items():
        pull = -c * signs / (1 + np.exp(signs * (table @ weights[:-1] + weights[-1])))
        np.testing.assert_allclose(weights[:-1] + table.T @ pull, 0, atol=1e-2)
        assert abs(pull.sum()) < 1e-2
    assert np.linalg.norm(found[0.1][:-1]) < np.linalg.norm(found[10.0][:-1])
    idf = bag_of_words.Features(texts, pairs=False, tf_idf=True)
    np.testing.assert_allclose(np.square(idf(texts).toarray()).sum(1), 1.0)


def test_the_best_checkpoint_of_a_classifier_is_the_most_accurate():
    """The loss can increase with the confidence while accuracy improves; of equal checkpoints, the newer is best."""
    ledger, task = TrainStats(), TASKS["classifier"]

    def record(step, *found):
        result = EvalLoss(found[0], 1.0, found[1])
        ledger.record_evaluation(step, result, task.metric(result))

    for step, (loss, accuracy) in enumerate([(0.5, 0.7), (0.6, 0.8), (0.7, 0.8), (0.4, 0.75)], 1):
        record(step, loss, accuracy)
    assert (ledger.best_step, ledger.best_loss, ledger.eval_metric) == (3, 0.4, 0.25)
    record(5, float("nan"), 1.0)
    assert (ledger.best_step, ledger.eval_metric) == (3, None)
    for by_loss in (0.5, 0.3, 0.6):
        ledger = ledger if by_loss != 0.5 else TrainStats()
        task = TASKS["causal_lm"]
        record(ledger.evaluated + 1, by_loss, 0.5)
    assert (ledger.best_step, ledger.best_loss, ledger.eval_metric) == (2, 0.3, 0.6)
