"""Numbers and their words in two languages."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

import numpy as np
import tensorflow_datasets as tfds

from transformer.data import number_words


@dataclasses.dataclass(eq=False, kw_only=True)
class NumberWordsConfig(tfds.core.BuilderConfig):
    """One pair of languages and its sizes; the name carries all of them, so that no two share prepared data.

    `source_language`, `target_language`, `max_digits`, `train_examples`, `validation_examples` and `test_examples` are
    those of `transformer.data.configs.NumberWords`.
    """

    source_language: str
    target_language: str
    max_digits: int
    train_examples: int
    validation_examples: int
    test_examples: int
    name: str = ""

    def __post_init__(self):
        sizes = f"{self.train_examples}_{self.validation_examples}_{self.test_examples}"
        self.name = f"{self.source_language}_{self.target_language}_{self.max_digits}_digits_{sizes}"


class NumberWordsBuilder(tfds.core.GeneratorBasedBuilder):
    """Numbers and their words in two languages: splits train, validation, test and basics (0-20 and d x 10^k), drawn as
    `builder_config` says.
    """

    name = "number_words"
    VERSION = tfds.core.Version("1.0.0")
    builder_config: NumberWordsConfig

    def _info(self) -> tfds.core.DatasetInfo:
        features = {
            "number": tfds.features.Scalar(dtype=np.int32),
            "times": tfds.features.Scalar(dtype=np.int32, doc="how often the number was drawn"),
            "source": tfds.features.Text(),
            "target": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Whole numbers written out in two languages, from num2words with corrections.",
            features=tfds.features.FeaturesDict(features),
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Iterator]:
        del dl_manager
        config = self.builder_config
        digits = config.max_digits
        return {
            "train": self._generate_examples(number_words.training_numbers(digits, config.train_examples)),
            "validation": self._generate_examples(
                number_words.held_out_numbers("validation", digits, config.validation_examples)
            ),
            "test": self._generate_examples(number_words.held_out_numbers("test", digits, config.test_examples)),
            "basics": self._generate_examples(number_words.basic_numbers(digits)),
        }

    def _generate_examples(self, numbers: list[int]) -> Iterator[tuple[int, dict]]:
        source, target = self.builder_config.source_language, self.builder_config.target_language
        for number, times in Counter(numbers).items():
            texts = {"source": number_words.words(number, source), "target": number_words.words(number, target)}
            yield number, {"number": number, "times": times, **texts}
