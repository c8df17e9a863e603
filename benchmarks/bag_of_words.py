"""Bag-of-words baseline for SST-2: logistic regression on counts of words and word pairs.

    python -m benchmarks.bag_of_words [--manual-dir FOLDER] [--data-dir FOLDER]

The baseline for configs/sst2.py, which uses the same sentences. Prints a Markdown table with one row per feature set:
the value of C with the highest accuracy on the validation sentences (the smallest one if several are equal), and the
accuracy on the validation and test sentences. The objective is that of scikit-learn's LogisticRegression with an
unregularized intercept: |w|^2 / 2 + C sum log(1 + exp(-y f(x))). Texts are split at whitespace. tf-idf uses 1 + log tf,
smoothed idf and rows normalized to length 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize
from scipy.sparse import csr_array, diags_array
from scipy.special import expit

from transformer.data import SST2Sentences

STRENGTHS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""values of C, from strong to weak regularization"""

Rows = Sequence[tuple[str, int]]
"""texts with their labels, 0 or 1"""


class Features:
    """Counts of the words of a text and, with `pairs`, of two adjacent words. The training texts define the vocabulary.

    Args:
        texts: the training texts.
        pairs: also count pairs of adjacent words.
        tf_idf: weight the counts by tf-idf.
    """

    def __init__(self, texts: Iterable[str], *, pairs: bool, tf_idf: bool):
        self._pairs, self._tf_idf = pairs, tf_idf
        documents = [set(self._terms(text)) for text in texts]
        frequency = Counter(term for document in documents for term in document)
        self._columns = {term: column for column, term in enumerate(sorted(frequency))}
        counts = np.array([frequency[term] for term in self._columns])
        # Smoothed inverse document frequency, as in scikit-learn: 1 + log((1 + n) / (1 + df)).
        self._idf = 1.0 + np.log((1 + len(documents)) / (1 + counts))

    def __len__(self) -> int:
        return len(self._columns)

    def __call__(self, texts: Iterable[str]) -> csr_array:
        """Return the features (texts, terms). Terms that are absent from the training texts are ignored."""
        values, columns, starts = [], [], [0]
        for text in texts:
            counts = Counter(self._columns[term] for term in self._terms(text) if term in self._columns)
            columns += counts.keys()
            values += counts.values()
            starts.append(len(columns))
        table = csr_array((np.array(values, float), columns, starts), shape=(len(starts) - 1, len(self)))
        if not self._tf_idf:
            return table
        table.data = (1.0 + np.log(table.data)) * self._idf[table.indices]  # sublinear tf (1 + log tf), times idf
        # Divide each row by its Euclidean length; the maximum avoids a division by 0 for a text without known terms.
        lengths = np.sqrt(table.multiply(table).sum(axis=1))
        return diags_array(1.0 / np.maximum(lengths, 1e-12)) @ table

    def _terms(self, text: str) -> list[str]:
        words = text.split()
        return words + [" ".join(pair) for pair in itertools.pairwise(words)] if self._pairs else words


def fit(table: csr_array, labels: np.ndarray, strength: float) -> np.ndarray:
    """Fit a logistic regression with L-BFGS.

    Args:
        table: features (texts, terms).
        labels: 0 or 1, (texts,).
        strength: C, the weight of the data term.

    Returns:
        The weights of the terms, followed by the intercept: (terms + 1,).
    """
    signs = 2.0 * labels - 1.0  # y in {-1, 1}

    def loss(weights: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (table @ weights[:-1] + weights[-1])  # y f(x)
        # Derivative by f(x) of C log(1 + exp(-y f(x))): -C y sigmoid(-y f(x)). The intercept has no penalty.
        pull = -strength * signs * expit(-margins)
        gradient = np.append(weights[:-1] + table.T @ pull, pull.sum())
        # logaddexp(0, -m) = log(1 + exp(-m)), without overflow for large negative margins.
        return 0.5 * weights[:-1] @ weights[:-1] + strength * np.logaddexp(0.0, -margins).sum(), gradient

    start = np.zeros(table.shape[1] + 1)
    close = {"maxiter": 2000, "gtol": 1e-5 * strength * len(labels)}
    return minimize(loss, start, jac=True, method="L-BFGS-B", options=close).x


def accuracy(table: csr_array, labels: np.ndarray, weights: np.ndarray) -> float:
    """Return the fraction of correctly classified rows."""
    return float(((table @ weights[:-1] + weights[-1] > 0) == labels).mean())


@dataclass(frozen=True)
class Result:
    """The classifier of one feature set with the highest validation accuracy."""

    features: int
    strength: float
    validation: float
    test: float


def best(splits: dict[str, Rows], *, pairs: bool, tf_idf: bool) -> Result:
    """Train with every C and select the one with the highest accuracy on `validation`.

    `test` is evaluated only for the selected classifier.
    """
    texts = {split: [text for text, _ in rows] for split, rows in splits.items()}
    labels = {split: np.array([label for _, label in rows]) for split, rows in splits.items()}
    features = Features(texts["train"], pairs=pairs, tf_idf=tf_idf)
    tables = {split: features(part) for split, part in texts.items()}
    fitted = {strength: fit(tables["train"], labels["train"], strength) for strength in STRENGTHS}
    right = {c: accuracy(tables["validation"], labels["validation"], weights) for c, weights in fitted.items()}
    chosen = max(right, key=right.__getitem__)  # max returns the first maximum: the smallest C
    return Result(len(features), chosen, right[chosen], accuracy(tables["test"], labels["test"], fitted[chosen]))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--manual-dir", help="folder with the files of the SST-2 sentences, for a machine without network access"
    )
    parser.add_argument("--data-dir", help="directory where TFDS stores prepared data")
    found = SST2Sentences(**vars(parser.parse_args())).read()
    print("| features | number | C | validation | test |\n| --- | --- | --- | --- | --- |")
    for tf_idf in (False, True):
        for pairs in (False, True):
            result = best(found.splits, pairs=pairs, tf_idf=tf_idf)
            name = ("tf-idf of words" if tf_idf else "counts of words") + (" and pairs" if pairs else "")
            right = f"{100 * result.validation:.2f} % | {100 * result.test:.2f} %"
            print(f"| {name} | {result.features:,} | {result.strength:g} | {right} |", flush=True)


if __name__ == "__main__":
    main()
