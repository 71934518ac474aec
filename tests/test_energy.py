"""The meter of energy on made-up machines whose answers are known: a tree of counters, a module for GPUs."""

from __future__ import annotations

import builtins
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from clouds import LAW, edge, serving, wait_until
from energies import Gpu, Machine, Nvml

from pipesd.clock import VirtualClock
from pipesd.config import EdgeConfig
from pipesd.edge.session import EdgeSession
from pipesd.energy import EnergyMeter, Reading, total
from pipesd.energy_cpu import CpuEnergy
from pipesd.energy_gpu import GpuEnergy
from pipesd.sim.drafters import Agreement, ScriptedDrafter
from pipesd.sim.tokeniser import ByteTokeniser


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "powercap")


# ---- processors


def test_packages_are_summed_and_nothing_else(machine: Machine) -> None:
    for number, name in (("0", "package-0"), ("0:0", "core"), ("0:1", "dram"), ("1", "package-1-die-0"), ("2", "psys")):
        machine.zone(number, name, 5_000_000)
    meter = CpuEnergy(10.0, machine.root)
    for number, uj in (("0", 8_500_000), ("0:0", 90_000_000), ("0:1", 90_000_000), ("1", 6_000_000), ("2", 90_000_000)):
        machine.count(number, uj)
    found = meter.end(12.0)
    assert {name: reading.joules for name, reading in found.items()} == {
        "CPU package-0": 3.5,
        "CPU package-1-die-0": 1.0,
    }
    assert all(reading.seconds == 2.0 and reading.source == "counter" for reading in found.values())
    assert total(found.values()).joules == 4.5


def test_a_counter_that_goes_round_is_followed_as_often_as_it_does(machine: Machine) -> None:
    """100 W for 25 minutes, through a counter of 20 kJ."""
    machine.zone("0", "package-0", 15_000_000_000, 20_000_000_000)
    meter = CpuEnergy(0.0, machine.root)
    for step in range(1, 101):
        machine.count("0", (15_000_000_000 + step * 1_500_000_000) % 20_000_000_000)
        meter.sample(step * 15.0)
    assert meter.joules(1500.0) == pytest.approx(150e3)


def test_a_counter_that_may_have_gone_all_the_way_round_gives_no_figure(machine: Machine) -> None:
    machine.zone("0", "package-0", 0)
    meter = CpuEnergy(0.0, machine.root)
    machine.count("0", 1_000_000)
    reading = total(meter.end(263.0).values())
    assert reading.joules is None and "not read for 263 s" in reading.why
    kept_up = CpuEnergy(0.0, machine.root)
    for time_s in range(10, 1000, 10):
        machine.count("0", 1_000_000 + time_s)
        kept_up.keep_up(float(time_s))
    assert kept_up.joules(1000.0) == pytest.approx(0.00099)


@pytest.mark.parametrize("uj", ["", "many", "0x12"])
def test_what_is_no_number_gives_no_figure(machine: Machine, uj: str) -> None:
    machine.zone("0", "package-0", uj)
    assert "no number" in total(CpuEnergy(0.0, machine.root).end(1.0).values()).why
    machine.zone("0", "package-0", 5)
    meter = CpuEnergy(0.0, machine.root)
    machine.count("0", uj)
    assert "no number" in total(meter.end(1.0).values()).why


def test_without_the_right_to_read_it_says_so(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.zone("0", "package-0", 5)
    read_text = Path.read_text

    def refused(self: Path, *rest: Any, **further: Any) -> str:
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return read_text(self, *rest, **further)

    monkeypatch.setattr(Path, "read_text", refused)
    (reading,) = CpuEnergy(0.0, machine.root).end(1.0).values()
    assert reading.joules is None and re.fullmatch(
        r".*intel-rapl:0/energy_uj: may be read by root only; .*", reading.why
    )


def test_one_package_that_vanishes_takes_the_sum_with_it(machine: Machine) -> None:
    for number in ("0", "1"):
        machine.zone(number, f"package-{number}", 5_000_000)
    meter = CpuEnergy(0.0, machine.root)
    (machine.root / "intel-rapl:1" / "energy_uj").unlink()
    machine.count("0", 6_000_000)
    found = meter.end(1.0)
    assert found["CPU package-0"].joules == 1.0
    assert (
        found["CPU package-1"].joules is None and "intel-rapl:1/energy_uj: No such file" in found["CPU package-1"].why
    )
    assert total(found.values()).joules is None


def test_a_counter_that_stands_still_is_no_zero(machine: Machine) -> None:
    machine.zone("0", "package-0", 0)
    reading = total(CpuEnergy(0.0, machine.root).end(5.0).values())
    assert reading.joules is None and "did not move in 5.000 s" in reading.why


def test_a_machine_without_counters_says_so(tmp_path: Path) -> None:
    reading = total(CpuEnergy(0.0, tmp_path / "nothing").end(1.0).values())
    assert reading.joules is None and str(tmp_path) in reading.why and "\n" not in reading.why
    assert total([]).joules is None


# ---- GPUs


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Nvml]]:
    made: list[Nvml] = []

    def install(*gpus: Gpu, failure: str = "") -> Nvml:
        made.append(Nvml(*gpus, failure=failure))
        monkeypatch.setitem(sys.modules, "pynvml", made[-1])  # type: ignore[arg-type]  # stands in for one
        return made[-1]

    yield install
    assert all(module.users == 0 for module in made), "each nvmlInit has its nvmlShutdown"


class Watch:
    """A time that is set by hand."""

    now_s = 100.0


def metered(watch: Watch, times_s: list[float], **settings: Any) -> dict[str, Reading]:
    meter = GpuEnergy(watch.now_s, **settings)
    for at_s in times_s:
        watch.now_s = 100.0 + at_s
        meter.sample(watch.now_s)
    return meter.end(watch.now_s)


UNEVEN_S = [0.005, 0.011, 0.3, 0.31, 1.0, 2.5, 4.0]


def test_constant_power_is_power_times_time_idle_included(nvml: Callable[..., Nvml]) -> None:
    nvml(Gpu(lambda: 80.0))
    (reading,) = metered(Watch(), UNEVEN_S).values()
    assert reading.joules == pytest.approx(320.0) and reading.source == "sampled"
    assert (reading.seconds, reading.samples, reading.longest_gap_s) == pytest.approx((4.0, 9, 1.5))


def test_a_ramp_is_integrated_by_trapezoids(nvml: Callable[..., Nvml]) -> None:
    watch = Watch()
    nvml(Gpu(lambda: 50.0 + 20.0 * (watch.now_s - 100.0)))
    (reading,) = metered(watch, UNEVEN_S).values()
    assert reading.joules == pytest.approx(50 * 4 + 20 * 4**2 / 2)


def test_work_and_idle_each_take_their_time(nvml: Callable[..., Nvml]) -> None:
    """10 W idle, 110 from second 1 to 2; a sample every 5 ms is off by at most the two edges."""
    watch = Watch()
    nvml(Gpu(lambda: 110.0 if 1.0 <= watch.now_s - 100.0 < 2.0 else 10.0))
    (reading,) = metered(watch, [0.005 * step for step in range(1, 801)]).values()
    assert reading.joules == pytest.approx(140.0, abs=1.0)


def test_the_counter_is_taken_and_the_samples_stand_beside(nvml: Callable[..., Nvml]) -> None:
    watch = Watch()
    nvml(Gpu(lambda: 80.0, lambda: 5e6 + 78.0 * (watch.now_s - 100.0)))
    (reading,) = metered(watch, UNEVEN_S).values()
    assert (reading.joules, reading.source) == (pytest.approx(312.0), "counter")
    assert reading.sampled_joules == pytest.approx(320.0)


def test_a_counter_that_stands_still_leaves_it_to_the_samples(nvml: Callable[..., Nvml]) -> None:
    nvml(Gpu(lambda: 80.0, lambda: 5e6))
    (reading,) = metered(Watch(), [0.01]).values()
    assert (reading.joules, reading.source) == (pytest.approx(0.8), "sampled")


def test_power_now_is_preferred_to_that_of_the_last_second(nvml: Callable[..., Nvml]) -> None:
    nvml(Gpu(lambda: 10.0, instant=lambda: 90.0))
    (reading,) = metered(Watch(), [1.0, 2.0]).values()
    assert reading.joules == pytest.approx(180.0)


def test_several_gpus_or_those_named(nvml: Callable[..., Nvml]) -> None:
    nvml(Gpu(lambda: 10.0), Gpu(lambda: 20.0), Gpu(lambda: 40.0))
    found = metered(Watch(), [1.0])
    assert {name: reading.joules for name, reading in found.items()} == pytest.approx(
        {"GPU 0": 10.0, "GPU 1": 20.0, "GPU 2": 40.0}
    )
    assert total(found.values()).joules == pytest.approx(70.0)
    assert total(metered(Watch(), [1.0], gpus=[2, "GPU-1"]).values()).joules == pytest.approx(60.0)
    found = metered(Watch(), [1.0], gpus=[0, 7])
    assert found["GPU 0"].joules == pytest.approx(10.0) and found["GPU 7"].why == "NVML, GPU 7: Invalid Argument"
    assert total(found.values()).joules is None, "part of it is not the whole"


def test_a_gpu_that_is_lost_has_no_figure(nvml: Callable[..., Nvml]) -> None:
    gpu, watch = Gpu(lambda: 80.0, lambda: watch.now_s), Watch()
    nvml(gpu)
    meter = GpuEnergy(100.0)
    gpu.lost = True
    watch.now_s = 101.0
    meter.sample(101.0)
    gpu.lost = False  # what it says from here on lacks the time between
    (reading,) = meter.end(102.0).values()
    assert (reading.joules, reading.source, reading.sampled_joules) == (1.0, "counter", None)
    meter, gpu.lost = GpuEnergy(100.0), True
    (reading,) = meter.end(102.0).values()
    assert reading.joules is None and reading.why == "NVML, GPU 0: power: GPU is lost"


def test_without_nvml_or_gpus_it_says_why(nvml: Callable[..., Nvml], monkeypatch: pytest.MonkeyPatch) -> None:
    nvml(failure="Driver Not Loaded")
    assert metered(Watch(), [1.0])["GPU"] == Reading(None, "NVML: Driver Not Loaded")
    nvml()
    assert metered(Watch(), [1.0])["GPU"] == Reading(None, "NVML: there is no GPU")
    monkeypatch.delitem(sys.modules, "pynvml")
    ordinary = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == "pynvml":
            raise ModuleNotFoundError("No module named 'pynvml'")
        return ordinary(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install nvidia-ml-py" in metered(Watch(), [1.0])["GPU"].why


# ---- both


def test_the_meter_watches_a_run(nvml: Callable[..., Nvml], machine: Machine) -> None:
    samples: list[float] = []
    nvml(Gpu(lambda: samples.append(80.0) or 80.0))  # type: ignore[func-returns-value]
    machine.zone("0", "package-0", 1_000_000)
    meter = EnergyMeter(powercap=machine.root)
    assert meter.gpu.joules is None and meter.cpu.joules is None
    begun_s = time.monotonic()
    with meter:
        wait_until(lambda: len(samples) >= 3, "three samples")
        machine.count("0", 4_000_000)
    assert meter.gpu.joules == pytest.approx(80.0 * meter.gpu.seconds)
    assert 0 < meter.gpu.seconds <= time.monotonic() - begun_s
    assert meter.gpu.samples >= 3 and meter.cpu.joules == 3.0
    assert set(meter.parts) == {"GPU 0", "CPU package-0"}
    with EnergyMeter(gpus=(), powercap=machine.root) as cpu_only:
        pass
    assert cpu_only.gpu.joules is None and set(cpu_only.parts) == {"CPU package-0"}


def test_the_meter_ends_with_a_run_that_fails(nvml: Callable[..., Nvml], tmp_path: Path) -> None:
    nvml(Gpu(lambda: 80.0))
    with pytest.raises(ZeroDivisionError), EnergyMeter(powercap=tmp_path) as meter:
        raise ZeroDivisionError
    assert meter.gpu.joules is not None and not meter._thread.is_alive()


# ---- in a session


@pytest.mark.parametrize("strategy", ["cloud", "vanilla", "local"])
def test_a_generation_says_what_the_processors_took_while_it_ran(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, strategy: str
) -> None:
    machine.zone("0", "package-0", 1_000_000)
    monkeypatch.setattr("pipesd.energy_cpu.POWERCAP", machine.root)
    with serving() as cloud, edge(cloud.address, strategy=strategy) as session:
        for at_uj in (5_000_000, 20_000_000):
            machine.count("0", at_uj)  # what was taken before it began
            pieces = session.generate("Once upon a time", max_tokens=20)
            next(pieces)
            machine.count("0", at_uj + 2_500_000)
            list(pieces)
            assert session.stats["energy_j"] == 2.5
        (machine.root / "intel-rapl:0" / "energy_uj").unlink()
        list(session.generate("Once upon a time", max_tokens=20))
        assert session.stats["energy_j"] is None


def test_virtual_time_takes_no_joules(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.zone("0", "package-0", 1_000_000)
    monkeypatch.setattr("pipesd.energy_cpu.POWERCAP", machine.root)
    config = EdgeConfig(strategy="local", draft="a file")
    drafter = ScriptedDrafter(Agreement(LAW, 0.8))
    with EdgeSession(config, drafter=drafter, tokeniser=ByteTokeniser(), clock=VirtualClock()) as session:
        pieces = session.generate("Once upon a time", max_tokens=20)
        next(pieces)
        machine.count("0", 3_000_000)
        list(pieces)
        assert session.stats["energy_j"] is None
