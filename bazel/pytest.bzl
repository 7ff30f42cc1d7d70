"""Tests that pytest runs."""

load("@rules_python//python:defs.bzl", "py_test")

def pytest_test(name, paths, srcs = [], data = [], **kwargs):
    """Runs pytest on some files or directories, with the settings of pyproject.toml.

    Args:
      name: The name of the target.
      paths: What to run, relative to the root of the repository.
      srcs: The test modules.
      data: Files that the tests read, besides pyproject.toml.
      **kwargs: Passed to py_test.
    """
    py_test(
        name = name,
        srcs = srcs + ["//bazel:pytest_main.py"],
        main = "//bazel:pytest_main.py",
        args = paths,
        data = data + ["//:pyproject.toml"],
        # Packages have the __init__.py files that the tree shows, and no others.
        legacy_create_init = 0,
        **kwargs
    )
