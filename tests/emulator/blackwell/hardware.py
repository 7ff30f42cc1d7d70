"""Launches probes on the first CUDA device from a process of its own.

A launch that faults leaves its process without a usable context, and one that hangs never ends; both would take the
answers of all others with them.
"""

import multiprocessing
from multiprocessing.connection import Connection

import numpy as np

from tests.emulator import launches
from tests.emulator.blackwell.probe import Probe
from tests.emulator.device import DeviceError

_SECONDS = 120


class Device:
    """A process that launches probes, started when it is needed."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def run(self, probe: Probe) -> list[list[np.ndarray]]:
        """Arrays after each round."""
        if self._process is None:
            self._start()
        self._connection.send(probe)
        if not self._connection.poll(_SECONDS):
            self.stop()
            raise DeviceError(f"{probe.name}: no end after {_SECONDS} s")
        try:
            answer = self._connection.recv()
        except EOFError:
            answer = "the process that launched it has died"
        if isinstance(answer, str):
            self.stop()
            raise DeviceError(f"{probe.name}: {answer}")
        return answer

    def stop(self) -> None:
        """End the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = None

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()


def _serve(connection: Connection) -> None:
    while True:
        probe = connection.recv()
        try:
            connection.send([launches.on_device(probe) for _ in range(probe.rounds)])
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")
