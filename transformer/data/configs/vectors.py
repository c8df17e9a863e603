"""Kinds of data that are numbers: time series and images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from transformer.config import ConfigError
from transformer.data.configs.common import check_path, check_share, check_whole


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """What every kind of time series has: examples are windows of `context_length` steps that are looked back at and
    `horizon` steps that are forecast, on the scale of the training steps.

    Raises:
        ConfigError: a number out of range, or not one mean and deviation for each column.
    """

    task: ClassVar[str] = "forecaster"

    context_length: int = 512
    """steps that are looked back at, as model.series.context_length"""
    horizon: int = 96
    """steps that are forecast, as model.series.horizon"""
    columns: tuple[str, ...] = ()
    """names of the channels, in order; none: all that hold numbers"""
    mean: tuple[float, ...] = ()
    """taken off each channel before the model sees it; none: the mean of the training steps"""
    std: tuple[float, ...] = ()
    """by which each channel is divided then; none: the standard deviation of the training steps"""
    batch_size: int = 128
    """windows in one step, over all devices and processes together"""
    eval_batch_size: int = 256
    """windows in one batch of evaluation"""

    def __post_init__(self):
        check_whole(self, "context_length", "horizon", "batch_size", "eval_batch_size")
        if len(set(self.columns)) < len(self.columns):
            raise ConfigError(f"columns must all be different, got {', '.join(self.columns)}.")
        if len(self.mean) != len(self.std) or (self.mean and len(self.mean) != len(self.columns)):
            raise ConfigError(
                f"mean and std must be given together, one number for each of columns: got {len(self.mean)} and "
                f"{len(self.std)} for {len(self.columns)} columns. Leave them out: they are computed."
            )
        if not all(std > 0 for std in self.std):
            raise ConfigError(f"std must be above 0, got {', '.join(map(str, self.std))}.")


@dataclass(frozen=True, kw_only=True)
class ETTh1(SeriesConfig):
    """Load and oil temperature of an electricity transformer, 7 channels, hourly (Zhou et al. 2021, arXiv 2012.07436),
    with the split of the literature: 12 months of 30 days to train on, 4 to validate, 4 to test.
    """

    kind: ClassVar[str] = "etth1"

    data_dir: str | None = None
    """where TFDS keeps prepared data (None: $TFDS_DATA_DIR, else ~/tensorflow_datasets)"""
    manual_dir: str | None = None
    """a folder that holds ETTh1.csv, for a machine without network"""


@dataclass(frozen=True, kw_only=True)
class SeriesFile(SeriesConfig):
    """A time series of one's own: a CSV file (UTF-8) whose first line names its columns, one step a line, in order.

    Raises:
        ConfigError: an empty path, or shares that leave nothing to train on.
    """

    kind: ClassVar[str] = "series_file"

    path: str
    """the file"""
    validation_share: float = 0.1
    """share of the steps, before those of the test, to evaluate on"""
    test_share: float = 0.2
    """share of the steps, at the end, to test on"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        _check_shares(self)


@dataclass(frozen=True, kw_only=True)
class ImageConfig:
    """What every kind of labeled images has.

    Raises:
        ConfigError: a number out of range, or labels that are one, empty or twice the same.
    """

    task: ClassVar[str] = "image_classifier"

    labels: tuple[str, ...] = ()
    """names of the classes, by number; none: their numbers"""
    max_shift: int = 0
    """training images are seen moved by up to so many pixels, up or down and to a side, each way once in a pass; what
    comes in is 0"""
    batch_size: int = 64
    """images in one step, over all devices and processes together"""
    eval_batch_size: int = 256
    """images in one batch of evaluation"""

    def __post_init__(self):
        check_whole(self, "batch_size", "eval_batch_size")
        check_whole(self, "max_shift", least=0)
        if len(self.labels) == 1 or len(set(self.labels)) < len(self.labels) or "" in self.labels:
            raise ConfigError(
                f"labels must be at least two, all different, got {', '.join(map(repr, self.labels))}. Leave them out "
                "to take their numbers."
            )


@dataclass(frozen=True, kw_only=True)
class Digits(ImageConfig):
    """Handwritten digits that scikit-learn brings along: 1,797 images of 8x8 pixels (Alpaydin and Kaynak 1998, UCI
    Optical Recognition of Handwritten Digits), 0 to 1; a tenth to validate and a fifth to test, by the images' SHA-256.

    Raises:
        ConfigError: other than ten labels.
    """

    kind: ClassVar[str] = "digits"

    labels: tuple[str, ...] = tuple("0123456789")
    """names of the ten classes"""

    def __post_init__(self):
        super().__post_init__()
        if len(self.labels) != 10:
            raise ConfigError(f"labels must be ten, for the digits 0 to 9, got {len(self.labels)}.")


@dataclass(frozen=True, kw_only=True)
class ImageFile(ImageConfig):
    """Images of one's own: a NumPy file (.npz) of two arrays, `images` (N, height, width) or (N, height, width,
    channels), bytes 0 to 255 or floating numbers as they are, and `labels` (N,), whole numbers from 0.

    Raises:
        ConfigError: an empty path, or shares that leave nothing to train on.
    """

    kind: ClassVar[str] = "image_file"

    path: str
    """the file"""
    validation_share: float = 0.1
    """share of the images, chosen by their SHA-256, to evaluate on"""
    test_share: float = 0.2
    """share of the images, chosen likewise, to test on"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        _check_shares(self)


def _check_shares(config: SeriesFile | ImageFile) -> None:
    check_share(config, "validation_share")
    check_share(config, "test_share")
    if config.validation_share + config.test_share >= 1:
        raise ConfigError(
            f"validation_share ({config.validation_share}) and test_share ({config.test_share}) leave nothing to train "
            "on. Give smaller ones."
        )
