"""Images in files: they are checked when the data is prepared, and decoded again when a batch needs them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from transformer.config._checks import ConfigError
from transformer.config._progress import counting
from transformer.data.files._texts import missing
from transformer.media._images import ImageProcessor

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""endings of the names of image files, in lower case"""
DEFAULT = ImageProcessor(shortest_edge=224, crop_height=224, crop_width=224)
"""default preprocessing, which --init replaces by the model's"""
READING = {"num_threads": 4, "prefetch_buffer_size": 8}
"""Grain options: threads that decode images, and number of batches that are read in advance"""


@dataclass(frozen=True, kw_only=True)
class ImageFilesConfig:
    """Options of kinds of data with images in files."""

    processor: ImageProcessor = DEFAULT
    """preprocessing of the images; with --init, the default is the model's preprocessing"""

    def __post_init__(self):
        super().__post_init__()
        if self.processor.size is None:
            raise ConfigError(
                "processor must give all images one size. Set --data.processor.height and width, or crop-height and "
                "crop-width."
            )


class ImageFiles:
    """Images in files, with the interface of an array (N, height, width, channels) of preprocessed pixels, float32.

    `names` are those of the images in errors, such as "pairs.csv, line 7"; `digests` the SHA-256 of the files.
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
        """Decode and preprocess images, (B, height, width, channels)."""
        return np.stack([self._read(int(row)) for row in rows])

    def subset(self, rows: Sequence[int]) -> ImageFiles:
        paths, names, digests = ([part[row] for row in rows] for part in (self.paths, self.names, self.digests))
        return ImageFiles(paths, names, self.processor, digests)

    def checked(self) -> ImageFiles:
        """Decode every image once, in several threads; return the images with the digests of their files.

        Raises FileNotFoundError or ValueError, with the name of the first image that is missing, damaged, too large or
        an animation.
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
    """Return the rows of each split, by the SHA-256 of their image, so that equal images are in one split.

    `shares` are those of the held-out splits; `what` names the data if a split has no row (ValueError).
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


def class_folders(path: str) -> list[Path]:
    """Return the sub-folders of a folder, sorted by name, without hidden ones."""
    folder = Path(path).expanduser()
    if not folder.exists():
        raise missing(folder, path, "folder")
    if not folder.is_dir():
        raise ValueError(f"{path} is not a folder. Pass a folder with one sub-folder of images for each class.")
    return sorted((one for one in folder.iterdir() if one.is_dir() and one.name[0] != "."), key=str)


def images_in(folder: Path, root: Path) -> Iterator[Path]:
    """Yield the image files of a folder, sorted by name, without hidden ones; nothing else may be in it."""
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


def image_rows(path: str, rows: Sequence[tuple[int, str, object]], processor: ImageProcessor) -> ImageFiles:
    """Return the images that the rows of a file name, (line, path, anything), by paths relative to its folder."""
    root = Path(path).expanduser().parent
    names = [f"{path}, line {line}" for line, _, _ in rows]
    paths = [inside(root / image, root, name) for (_, image, _), name in zip(rows, names, strict=True)]
    return ImageFiles(paths, names, processor)
