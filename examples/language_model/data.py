"""Text as bytes: English that comes with Python, the language reference from `pydoc_data.topics`, or any other."""

import dataclasses
import hashlib
from pydoc_data.topics import topics

import numpy as np


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Bytes to learn from and bytes held out.

    Attributes:
      training: uint8 [bytes].
      held_out: uint8 [bytes], the end of the text.
    """

    training: np.ndarray
    held_out: np.ndarray

    @property
    def digest(self) -> str:
        """Tells texts, and where they are split, apart."""
        return hashlib.sha256(hashlib.sha256(self.training.tobytes()).digest() + self.held_out.tobytes()).hexdigest()[
            :16
        ]


def load_corpus(held_out_fraction: float = 0.1) -> Corpus:
    """Reads the text and holds out its end.

    Topics share paragraphs; only the first of equal ones is kept, so that nothing held out is also learned.

    Args:
      held_out_fraction: Part of the text to hold out.

    Returns:
      The corpus.
    """
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    text = "\n\n".join(dict.fromkeys(paragraphs))
    return split_text(text.encode(), held_out_fraction)


def split_text(text: bytes, held_out_fraction: float) -> Corpus:
    """Holds out the end of a text.

    Args:
      text: To learn from.
      held_out_fraction: Part of it to hold out.

    Returns:
      The corpus.
    """
    data = np.frombuffer(text, np.uint8)
    split = round(len(data) * (1 - held_out_fraction))
    return Corpus(data[:split], data[split:])


def training_batch(
    data: np.ndarray, *, seed: int, step: int, batch: int, length: int, rows: slice = slice(None)
) -> np.ndarray:
    """Draws windows at random; the same for the same seed and step, so a resumed run sees the same data.

    Args:
      data: uint8 [bytes].
      seed: Of the run.
      step: Of the training.
      batch: Number of windows.
      length: Bytes to predict in each window.
      rows: Of the batch, those to read; where they start is drawn for all.

    Returns:
      int32 [rows, length + 1]: each window and the byte after it.
    """
    starts = np.random.default_rng([seed, step]).integers(0, len(data) - length, batch)
    return _windows(data, starts[rows], length)


def spread_windows(data: np.ndarray, *, count: int | None, length: int) -> np.ndarray:
    """Takes evenly spread windows that do not overlap.

    Args:
      data: uint8 [bytes].
      count: At most so many windows; None for all that fit.
      length: Bytes to predict in each window.

    Returns:
      int32 [count, length + 1].

    Raises:
      ValueError: If not even one window fits.
    """
    fitting = (len(data) - 1) // length
    if fitting == 0:
        raise ValueError(f"length: expected at most {len(data) - 1}, got {length}")
    chosen = np.linspace(0, fitting - 1, min(count or fitting, fitting)).astype(int)
    return _windows(data, chosen * length, length)


def _windows(data: np.ndarray, starts: np.ndarray, length: int) -> np.ndarray:
    return data[starts[:, None] + np.arange(length + 1)].astype(np.int32)
