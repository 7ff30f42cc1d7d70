"""What more devices would give: a model of computation and communication, fed with what two devices gave."""

import dataclasses
import math
from collections.abc import Mapping

from benchmarks.scaling.measure import Result

NVLINK = 450e9
"""Bytes a second that an H200 sends over NVLink: 900 GB/s in both directions together, by its data sheet."""

INFINIBAND = 50e9
"""Bytes a second of a 400 Gb/s InfiniBand link, of which each GPU has one."""

ATTAINED = 0.8
"""The part of a link's rate that collectives of this size are taken to reach."""

GPUS_A_HOST = 8


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A step on more devices.

    Attributes:
      name: The way to split.
      devices: How many.
      scaling: "strong", the same step split, or "weak", a step that grows with the devices.
      compute: Seconds of computation on each.
      sent_bytes: That each sends.
      communication: Seconds of it.
      tokens: Of the step.
      one_device: Tokens a second of one device.
    """

    name: str
    devices: int
    scaling: str
    compute: float
    sent_bytes: float
    communication: float
    tokens: float
    one_device: float

    def efficiency(self, *, overlapped: bool) -> float:
        """Tokens a second and device against those of one device, with communication hidden or not at all."""
        seconds = max(self.compute, self.communication) if overlapped else self.compute + self.communication
        return self.tokens / seconds / self.devices / self.one_device


def bandwidth(devices: int) -> float:
    """Bytes a second that a device sends to the others."""
    return ATTAINED * (NVLINK if devices <= GPUS_A_HOST else INFINIBAND)


def predict(two: Result, one: Result, sent_bytes: Mapping[str, float], devices: int, scaling: str) -> Prediction:
    """Predicts a step.

    Args:
      two: The case on two devices.
      one: The case on one device whose computation is split.
      sent_bytes: What each of the two devices sends, by kind of collective.
      devices: How many are asked about.
      scaling: "strong" or "weak".

    Returns:
      The prediction.
    """
    growth = devices if scaling == "weak" else 1
    sent = sum(_sent(two, kind, x, devices, growth) for kind, x in sent_bytes.items())
    return Prediction(
        name=two.name,
        devices=devices,
        scaling=scaling,
        compute=one.seconds * _work(two, growth) / devices,
        sent_bytes=sent,
        communication=sent / bandwidth(devices),
        tokens=two.tokens * growth,
        one_device=one.tokens / one.seconds * (growth / _work(two, growth)),
    )


def _sent(two: Result, kind: str, sent: float, devices: int, growth: int) -> float:
    """Bytes that a device sends, from those of two devices.

    Gathers and sums send (n - 1) / n of their arrays, which are parameters and do not grow, or with tensor parallelism
    the activations of all tokens, which do. What travels around a ring is a shard's part of the keys, n - 1 times.

    Args:
      two: The case on two devices.
      kind: Of the collectives.
      sent: Bytes that each of the two sends.
      devices: n.
      growth: Of the step.

    Returns:
      Bytes.
    """
    if kind == "collective-permute":
        return sent * growth * 2 * (devices - 1) / devices
    activations = "model=2" in two.mesh
    return sent * (growth if activations else 1) * 2 * (devices - 1) / devices


def _work(two: Result, growth: int) -> float:
    """Operations, in those of the measured step; in a ring the sequence grows, and attention with its square."""
    if "seq" not in two.mesh:
        return growth
    attention = attention_part(two)
    return growth * (1 - attention) + growth**2 * attention


def attention_part(result: Result) -> float:
    """The part of a step's operations that attention has."""
    products = 6.0 * result.products * result.tokens
    return 1 - products / result.flops if result.flops else math.nan
