"""Runs pytest as a Bazel test: see pytest.bzl."""

import os
import sys

import pytest


def main(paths: list[str]) -> int:
    # Bazel starts tests in the root of their copy of the repository.
    args = ["--config-file=pyproject.toml", "--rootdir=.", "-p", "no:cacheprovider"]
    if report := os.environ.get("XML_OUTPUT_FILE"):
        args.append(f"--junitxml={report}")
    if tmp := os.environ.get("TEST_TMPDIR"):
        args.append(f"--basetemp={tmp}/pytest")
    if test_filter := os.environ.get("TESTBRIDGE_TEST_ONLY"):  # bazel test --test_filter=...
        args.append(f"-k={test_filter}")
    return pytest.main(args + paths)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
