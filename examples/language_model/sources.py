"""A larger text: the Python sources that are installed, for models that learn the language reference by heart."""

import gzip
import hashlib
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

MEGABYTES = 48
MOST_BYTES_A_FILE = 200_000
"""Longer files are tables that programs wrote."""


def installed_directories() -> list[Path]:
    """Where the standard library and the installed packages are."""
    paths = sysconfig.get_paths()
    return [Path(paths[name]) for name in ("stdlib", "purelib")]


def gather(directories: Iterable[Path], most_bytes: int) -> bytes:
    """Joins Python sources, each paragraph once, in the order of the files' digests.

    The order depends on no name, so the end of the text is a random part of it, and the same files give the same text.

    Args:
      directories: Searched with all below them.
      most_bytes: Where to stop.

    Returns:
      The text, UTF-8.
    """
    seen: set[bytes] = set()
    parts: list[bytes] = []
    size = 0
    for _, path in sorted(set(_digests(directories))):
        new = []
        for paragraph in path.read_bytes().split(b"\n\n"):
            if paragraph.strip() and (digest := hashlib.sha256(paragraph.strip()).digest()[:12]) not in seen:
                seen.add(digest)
                new.append(paragraph)
        parts.append(b"\n\n".join(new))
        size += len(parts[-1]) + 2
        if size >= most_bytes:
            break
    return b"\n\n".join(parts)[:most_bytes]


def write(path: Path, text: bytes) -> None:
    """Writes a text, compressed; equal texts give equal files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0))


def read(path: Path) -> bytes:
    """Reads what :func:`write` wrote."""
    return gzip.decompress(path.read_bytes())


def _digests(directories: Iterable[Path]) -> Iterator[tuple[bytes, Path]]:
    """Digest and path of every file, one of those that are equal."""
    found: dict[bytes, Path] = {}
    for directory in directories:
        for path in sorted(directory.rglob("*.py")):
            if path.is_file() and path.stat().st_size <= MOST_BYTES_A_FILE:
                found.setdefault(hashlib.sha256(path.read_bytes()).digest(), path)
    yield from found.items()
