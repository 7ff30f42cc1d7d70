"""Writes the Python sources that are installed into one file, for `examples.train_language_model --corpus`.

Usage: python -m examples.gather_sources FILE.gz [--megabytes 48]

Another machine has other sources installed; FILE.gz takes the text of this one there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.language_model import sources


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the text.

    Args:
      arguments: Command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(description="Writes the Python sources that are installed into one file.")
    parser.add_argument("file", type=Path, metavar="FILE.gz")
    parser.add_argument("--megabytes", type=int, default=sources.MEGABYTES, help="at most (default: %(default)s)")
    parsed = parser.parse_args(arguments)
    text = sources.gather(sources.installed_directories(), parsed.megabytes * 1_000_000)
    sources.write(parsed.file, text)
    print(f"{len(text) / 1e6:.1f} MB of text, {parsed.file.stat().st_size / 1e6:.1f} MB compressed: {parsed.file}")


if __name__ == "__main__":
    main()
