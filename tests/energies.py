"""Made-up sources of energy figures: the kernel's counters of processors, NVIDIA's module for GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RANGE_UJ = 262_143_328_850


class Machine:
    """A powercap tree; zones are named as the kernel does."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def zone(self, number: str, name: str, uj: int | str, range_uj: int = RANGE_UJ) -> None:
        folder = self.root / f"intel-rapl:{number}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "name").write_text(f"{name}\n")
        (folder / "max_energy_range_uj").write_text(f"{range_uj}\n")
        self.count(number, uj)

    def count(self, number: str, uj: int | str) -> None:
        (self.root / f"intel-rapl:{number}" / "energy_uj").write_text(f"{uj}\n")


class NVMLError(Exception):
    pass


class Gpu:
    """Power (W) by `power`; `counter_j` by its counter, None: it has none. Each call may `fail`."""

    def __init__(
        self, power: Callable[[], float] = lambda: 0.0, counter_j: Callable[[], float] | None = None, *,
        instant: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        self.power, self.counter_j, self.instant, self.lost = power, counter_j, instant, False


class Nvml(SimpleNamespace):
    """The part of `pynvml` that the meter uses."""

    NVMLError = NVMLError
    NVML_SUCCESS, NVML_FI_DEV_POWER_INSTANT = 0, 186

    def __init__(self, *gpus: Gpu, failure: str = "") -> None:
        super().__init__(gpus=gpus, failure=failure, users=0)

    def nvmlInit(self) -> None:
        if self.failure:
            raise NVMLError(self.failure)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if index >= len(self.gpus):
            raise NVMLError("Invalid Argument")
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        if not uuid.startswith("GPU-"):
            raise NVMLError("Not Found")
        return self.gpus[int(uuid.removeprefix("GPU-"))]

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        if gpu.lost:
            raise NVMLError("GPU is lost")
        return round(gpu.power() * 1e3)

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: Gpu) -> int:
        if gpu.lost or gpu.counter_j is None:
            raise NVMLError("Not Supported")
        return round(gpu.counter_j() * 1e3)

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        assert fields == [self.NVML_FI_DEV_POWER_INSTANT]
        if gpu.instant is None:
            return [SimpleNamespace(nvmlReturn=3, value=SimpleNamespace(uiVal=12345))]
        return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=round(gpu.instant() * 1e3)))]
