"""Images in files: they are checked when the data is prepared, and decoded again when a batch needs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from transformer.config._checks import ConfigError, nearest
from transformer.config._progress import counting
from transformer.media._images import ImageProcessor

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""endings of the names of image files, in lower case"""
DEFAULT = ImageProcessor(shortest_edge=224, crop_height=224, crop_width=224)
"""default preprocessing, which --init replaces by that of the model"""
READING = {"num_threads": 4, "prefetch_buffer_size": 8}
"""Grain options: threads that decode images, and number of batches that are read in advance"""


@dataclass(frozen=True, kw_only=True)
class ImageFilesConfig:
    """Options of kinds of data with images in files.

    Raises:
        ConfigError: a preprocessing whose results differ in size.
    """

    processor: ImageProcessor = DEFAULT
    """preprocessing of the images; with --init, the default means that of the model"""

    def __post_init__(self):
        super().__post_init__()
        if self.processor.size is None:
            raise ConfigError(
                "processor must give all images one size. Set --data.processor.height and width, or crop-height and "
                "crop-width."
            )


class ImageFiles:
    """Images in files, with the interface of an array (N, height, width, channels) of preprocessed pixels, float32.

    Args:
        paths: files.
        names: names of the images in errors, such as "pairs.csv, line 7".
        processor: preprocessing to one size.
        digests: SHA-256 of the content of each file, as `checked` returns it.
    """

    def __init__(
        self, paths: Sequence[Path], names: Sequence[str], processor: ImageProcessor, digests: Sequence[str] = ()
    ):
        self.paths, self.names, self.processor, self.digests = list(paths), list(names), processor, list(digests)

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Number of images, height, width and channels."""
        return (len(self), *self.processor.size, len(self.processor.mean))

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        """Decode and preprocess images, (B, height, width, channels).

        Raises:
            FileNotFoundError, ValueError: an image can't be read; the message names it.
        """
        return np.stack([self._read(int(row)) for row in rows])

    def subset(self, rows: Sequence[int]) -> ImageFiles:
        """Return some of the images."""
        parts = ([values[row] for row in rows] for values in (self.paths, self.names, self.digests))
        paths, names, digests = parts
        return ImageFiles(paths, names, self.processor, digests)

    def checked(self) -> ImageFiles:
        """Decode every image once, in several threads; return the images with the digests of their files.

        Raises:
            FileNotFoundError, ValueError: a file is missing, is no image, is damaged, too large or an animation; the
                message names the first such image.
        """
        add, digests = counting("images", len(self)), []
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            try:
                for digest in threads.map(self._checked, range(len(self))):
                    digests.append(digest)
                    add(1)
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        return ImageFiles(self.paths, self.names, self.processor, digests)

    def digest(self) -> str:
        """Return the SHA-256 of the contents of all files and of the preprocessing."""
        return hashlib.sha256("\n".join([repr(self.processor), *self.digests]).encode()).hexdigest()

    def _read(self, row: int) -> np.ndarray:
        try:
            return self.processor([self.paths[row]])[0]
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{self.names[row]}: {error}") from None
        except (ValueError, OSError) as error:
            raise ValueError(f"{self.names[row]}: {error}") from error

    def _checked(self, row: int) -> str:
        from PIL import Image  # here: the package pillow is only needed for images in files

        self._read(row)
        with Image.open(self.paths[row]) as image:
            if (frames := getattr(image, "n_frames", 1)) > 1:
                raise ValueError(
                    f"{self.names[row]}: {self.paths[row]} has {frames} frames: expected a single image. Save one of "
                    f"its frames as PNG."
                )
        return hashlib.sha256(self.paths[row].read_bytes()).hexdigest()


def split_by_digest(digests: Sequence[str], shares: dict[str, float], what: str) -> dict[str, list[int]]:
    """Split rows by the digest of their image, so that equal images are in one split.

    Args:
        digests: SHA-256 of the image of each row.
        shares: fraction of each held-out split; "train" gets the rest.
        what: name of the data in the error.

    Returns:
        split -> rows.

    Raises:
        ValueError: a split has no row.
    """
    found: dict[str, list[int]] = {name: [] for name in ("train", *shares)}
    for row, digest in enumerate(digests):
        place, split = int(digest[:8], 16) / 2**32, "train"  # uniformly distributed over distinct images
        for name, share in shares.items():
            if 0 <= place < share:
                split = name
            place -= share
        found[split].append(row)
    if empty := [name for name, rows in found.items() if not rows]:
        raise ValueError(
            f"{what} has {len(digests)} images, too few for these shares: the {empty[0]} split has none. Use more "
            f"images, or other shares."
        )
    return found


def folder_of(path: str) -> Path:
    """Return the folder with this path. Raises FileNotFoundError or ValueError if there is none."""
    folder = Path(path).expanduser()
    if not folder.exists():
        siblings = [other.name for other in folder.parent.iterdir()] if folder.parent.is_dir() else []
        raise FileNotFoundError(f"no folder {path}.{nearest(folder.name, siblings)} Check the path.")
    if not folder.is_dir():
        raise ValueError(f"{path} is not a folder. Pass a folder with one sub-folder of images for each class.")
    return folder


def class_folders(path: str) -> list[Path]:
    """Return the sub-folders of a folder, sorted by name, without hidden ones.

    Raises:
        FileNotFoundError: the folder does not exist.
        ValueError: it is not a folder.
    """
    return sorted((one for one in folder_of(path).iterdir() if one.is_dir() and one.name[0] != "."), key=str)


def images_in(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the image files of a folder, sorted by name, without hidden ones.

    Raises:
        ValueError: it contains something else, or a link to a file outside of `root`.
    """
    for path in sorted(folder.iterdir(), key=str):
        if path.name.startswith("."):
            continue
        if not path.is_file() or path.suffix.lower() not in ENDINGS:
            raise ValueError(
                f"{path} is not an image: expected files that end with {', '.join(ENDINGS)}. Remove it, or convert it."
            )
        yield inside(path, root, str(path))


def inside(path: Path, root: Path, name: str) -> Path:
    """Return a path. Raises ValueError, with `name`, if the file that it leads to is outside of the folder `root`."""
    if not path.resolve().is_relative_to(root.resolve()):
        raise ValueError(
            f"{name}: {path} is outside of the folder {root}, and no file outside of it is read. Copy the image into "
            f"it, and use a relative path."
        )
    return path


def image_rows(path: str, rows: Sequence[tuple[int, str, Any]], processor: ImageProcessor) -> ImageFiles:
    """Return the images that the rows of a file name, by paths relative to its folder.

    Args:
        path: the file.
        rows: (line, path of the image, anything).
        processor: preprocessing.

    Raises:
        ValueError: a path leads to a file outside of the folder of the file.
    """
    root = Path(path).expanduser().parent
    names = [f"{path}, line {line}" for line, _, _ in rows]
    paths = [inside(root / image, root, name) for (_, image, _), name in zip(rows, names, strict=True)]
    return ImageFiles(paths, names, processor)
