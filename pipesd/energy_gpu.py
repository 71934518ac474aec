"""The energy of NVIDIA GPUs, by NVML (the package nvidia-ml-py, loaded when a meter begins).

Volta and later count their energy themselves (`nvmlDeviceGetTotalEnergyConsumption`, mJ, in steps of up to a tenth of a
second). Power is what `NVML_FI_DEV_POWER_INSTANT` says, where the driver has it: `nvmlDeviceGetPowerUsage` is the mean
of the last second on most GPUs since Ampere. Both are of the whole board, whoever uses it, memory included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipesd.energy_reading import Reading


class GpuEnergy:
    """The GPUs named by their index or UUID as NVML counts them (CUDA_VISIBLE_DEVICES changes nothing), or all, from
    construction until `end`. Between, `sample` is to be called every few ms."""

    def __init__(self, now_s: float, gpus: Sequence[int | str] | None = None) -> None:
        self._gpus: list[_Gpu] = []
        self._why: dict[str, str] = {}  # by what was asked for
        self._nvml: Any = None
        try:
            import pynvml
        except ImportError:
            self._why["GPU"] = "NVML needs the package nvidia-ml-py: pip install nvidia-ml-py"
            return
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._why["GPU"] = f"NVML: {error}"
            return
        self._nvml = pynvml
        if gpus is None:
            try:
                gpus = range(pynvml.nvmlDeviceGetCount())
            except pynvml.NVMLError as error:
                self._why["GPU"] = f"NVML: {error}"
                return
        for gpu in gpus:
            try:
                self._gpus.append(_Gpu(pynvml, gpu, now_s))
            except pynvml.NVMLError as error:
                self._why[f"GPU {gpu}"] = f"NVML, GPU {gpu}: {error}"
        if not self._gpus and not self._why:
            self._why["GPU"] = "NVML: there is no GPU"

    def sample(self, now_s: float) -> None:
        """Read the power of each."""
        for gpu in self._gpus:
            gpu.sample(now_s)

    def end(self, now_s: float) -> dict[str, Reading]:
        """A reading for each GPU, or why there is none."""
        readings = {name: Reading(None, why) for name, why in self._why.items()}
        readings |= {gpu.name: gpu.end(now_s) for gpu in self._gpus}
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        return readings


class _Gpu:
    def __init__(self, nvml: Any, gpu: int | str, now_s: float) -> None:
        """NVMLError for one that is not there."""
        self._nvml = nvml
        of_uuid, of_index = nvml.nvmlDeviceGetHandleByUUID, nvml.nvmlDeviceGetHandleByIndex
        self._handle = of_uuid(gpu) if isinstance(gpu, str) else of_index(gpu)
        self.name = f"GPU {gpu}"
        self._begun_s = self._last_s = now_s
        self._begun_mj = self._counter_mj()
        self._joules = 0.0
        self._samples = 0
        self._longest_s = 0.0
        self._last_w, self._why_no_power = 0.0, ""
        self._instant = hasattr(nvml, "NVML_FI_DEV_POWER_INSTANT") and self._instant_mw() is not None
        self.sample(now_s)

    def sample(self, now_s: float) -> None:
        if self._why_no_power:
            return
        try:
            power_w = self._power_mw() / 1e3
        except self._nvml.NVMLError as error:
            self._why_no_power = f"NVML, {self.name}: power: {error}"
            return
        gap_s = now_s - self._last_s
        if self._samples:
            self._joules += (self._last_w + power_w) / 2 * gap_s  # the trapezoid between two samples
        self._last_s, self._last_w = now_s, power_w
        self._samples += 1
        self._longest_s = max(self._longest_s, gap_s)

    def end(self, now_s: float) -> Reading:
        self.sample(now_s)
        seconds = now_s - self._begun_s
        sampled = None if self._why_no_power or seconds <= 0 else self._joules
        watched: dict[str, Any] = {"samples": self._samples, "longest_gap_s": self._longest_s}
        counted_mj = None
        if self._begun_mj is not None:
            ended_mj = self._counter_mj()
            counted_mj = None if ended_mj is None else ended_mj - self._begun_mj
        if counted_mj is not None and counted_mj > 0:  # it may not have moved in a short run
            return Reading(counted_mj / 1e3, "", seconds, "counter", sampled, **watched)
        if sampled is None:
            return Reading(None, self._why_no_power or f"NVML, {self.name}: the run took no time", seconds, **watched)
        return Reading(sampled, "", seconds, "sampled", sampled, **watched)

    def _counter_mj(self) -> int | None:
        """What the GPU has counted, None where it has no counter."""
        try:
            return int(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle))
        except self._nvml.NVMLError:
            return None

    def _power_mw(self) -> float:
        if self._instant and (power_mw := self._instant_mw()) is not None:
            return power_mw
        return float(self._nvml.nvmlDeviceGetPowerUsage(self._handle))

    def _instant_mw(self) -> float | None:
        """Power now, None where the GPU or its driver does not tell."""
        try:
            (field,) = self._nvml.nvmlDeviceGetFieldValues(self._handle, [self._nvml.NVML_FI_DEV_POWER_INSTANT])
        except self._nvml.NVMLError:
            return None
        return float(field.value.uiVal) if field.nvmlReturn == self._nvml.NVML_SUCCESS else None
