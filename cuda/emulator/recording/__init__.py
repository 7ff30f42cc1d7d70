"""Launches of CuTe DSL kernels, recorded without a GPU."""

from .launch import Encoding, Parameter, Place, RecordedLaunch

__all__ = ["Encoding", "Parameter", "Place", "RecordedLaunch"]
