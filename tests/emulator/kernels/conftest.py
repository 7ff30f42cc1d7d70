"""Keeps pytest from importing the kernels, which need the compiler."""

collect_ignore_glob = ["*.py"]
