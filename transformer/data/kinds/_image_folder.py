"""Labeled images in folders of the user: one sub-folder for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from transformer.config._checks import nearest
from transformer.data._config import check_path, check_shares
from transformer.data._images import ImageConfig, Images
from transformer.data.files._images import ImageFiles, ImageFilesConfig, class_folders, images_in, split_by_digest


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFilesConfig, ImageConfig):
    """Your own labeled images: a folder with one sub-folder of image files for each class.

    The names of the sub-folders are the classes, in alphabetical order. Every image is decoded once when the data is
    prepared, to find damaged files, and again when a batch needs it.

    Raises:
        ConfigError: an empty path, shares that leave nothing for training, or a preprocessing without a size.
    """

    kind: ClassVar[str] = "image_folder"

    path: str
    """path of the folder"""
    validation_path: str | None = None
    """path of a second folder for evaluation; None: hold out a part of the images of each class"""
    validation_share: float = 0.1
    """without validation_path: fraction of the images to hold out for evaluation, by the SHA-256 of a file"""
    test_share: float = 0.1
    """without validation_path: fraction of the images to hold out for the test, by the SHA-256 of a file"""

    def __post_init__(self):
        super().__post_init__()
        check_path(self, "path")
        check_shares(self)

    def class_names(self) -> tuple[str, ...]:
        """Return the names of the sub-folders, or `labels`. Raises FileNotFoundError or ValueError for no folder."""
        return self.labels or tuple(folder.name for folder in class_folders(self.path))

    def read(self) -> Images:
        """Return the images. ValueError for fewer than two classes, for other contents, and for unreadable images."""
        labels = self.class_names()
        if len(labels) < 2:
            raise ValueError(
                f"{self.path} has {len(labels)} sub-folders: expected at least two, one for each class. Check the path."
            )
        images, numbers = self._labeled(self.path, labels)
        if self.validation_path is not None:
            held_out = self._labeled(self.validation_path, labels)
            return Images({"train": (images, numbers), "validation": held_out}, labels)
        shares = {"validation": self.validation_share, "test": self.test_share}
        parts = split_by_digest(images.digests, shares, self.path)
        return Images({split: (images.subset(rows), numbers[rows]) for split, rows in parts.items()}, labels)

    def _labeled(self, path: str, labels: tuple[str, ...]) -> tuple[ImageFiles, np.ndarray]:
        """Return the images of a folder and their class indices (N,)."""
        root, paths, numbers = Path(path).expanduser(), [], []
        for folder in class_folders(path):
            if folder.name not in labels:
                raise ValueError(
                    f"{folder} is not the folder of a class: expected {', '.join(labels)}."
                    f"{nearest(folder.name, labels)} Rename it, or list all classes (--data.labels)."
                )
            found = list(images_in(folder, root))
            paths += found
            numbers += [labels.index(folder.name)] * len(found)
        if not paths:
            raise ValueError(f"{path} has no images: expected image files in its sub-folders. Check the path.")
        return ImageFiles(paths, [str(one) for one in paths], self.processor).checked(), np.array(numbers, np.int32)
