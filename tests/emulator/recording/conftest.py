"""Keeps pytest from importing the kernel, which needs the compiler."""

collect_ignore_glob = ["*_kernel.py"]
