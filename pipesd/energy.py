"""A meter of energy around a run: this machine's GPUs and processor packages, idle time included.

    with EnergyMeter() as meter:
        ...
    meter.gpu.joules, meter.gpu.why, meter.cpu.joules

What cannot be read has no figure and says why; nothing is estimated. A run should take seconds: counters move in steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from pipesd.energy_cpu import CpuEnergy
from pipesd.energy_gpu import GpuEnergy
from pipesd.energy_reading import Reading, total

__all__ = ["EnergyMeter", "Reading", "total"]

PERIOD_S = 0.005  # between two samples of power, as PipeSD (arXiv 2605.13319) took them


class EnergyMeter:
    """From `with` to its end, once; afterwards `gpu` and `cpu` are the sums, `parts` the reading of each device.

    `gpus`: indices or UUIDs as NVML has them, None for all, () for none. A thread samples; it takes some of a core.
    """

    def __init__(self, *, gpus: Sequence[int | str] | None = None, powercap: Path | None = None) -> None:
        self._named, self._powercap = gpus, powercap
        self.parts: dict[str, Reading] = {}
        self.gpu = self.cpu = Reading(None, "the run has not ended")
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self._gpus = None if self._named == () else GpuEnergy(time.monotonic(), self._named)
        self._cpus = CpuEnergy(time.monotonic(), self._powercap)
        self._thread = threading.Thread(target=self._sample, name="pipesd-energy", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        gpus = {} if self._gpus is None else self._gpus.end(time.monotonic())
        cpus = self._cpus.end(time.monotonic())
        self.gpu = Reading(None, "no GPU was asked for") if self._gpus is None else total(gpus.values())
        self.cpu = total(cpus.values())
        self.parts = gpus | cpus

    def _sample(self) -> None:
        while not self._ended.wait(PERIOD_S):
            if self._gpus is not None:
                self._gpus.sample(time.monotonic())
            self._cpus.keep_up(time.monotonic())
