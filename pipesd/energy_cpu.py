"""The energy of this machine's processors, by the counters that Linux shows under powercap (RAPL, Intel and AMD).

/sys/class/powercap/intel-rapl:N is a zone each, "package-…" by its file `name` where it is a whole processor package.
`energy_uj` counts µJ up to `max_energy_range_uj` and begins at 0 again. Since Linux 5.10 only root may read it. Zones
within a package (cores, graphics) are part of it, memory ("dram") and the platform ("psys") are left out. A package is
everything that runs on it: other programs are counted too.
"""

from __future__ import annotations

from pathlib import Path

from pipesd.energy_reading import Reading, total

POWERCAP = Path("/sys/class/powercap")
MOST_W = 1000.0  # no processor package takes more: for so long a counter cannot have gone all the way round
KEEP_UP_S = 20.0  # counters go round after 65 kJ at the earliest


class CpuEnergy:
    """All packages from construction until `end`. Between two readings of a counter it must not go all the way round,
    which takes a minute at least: `keep_up` or `sample` is to be called meanwhile; if not, there is no figure."""

    def __init__(self, now_s: float, root: Path | None = None) -> None:
        root = root or POWERCAP
        self._why = ""
        self._last_s = now_s
        self._packages: list[_Package] = []
        try:
            zones = sorted(root.glob("intel-rapl:*"))
            named = [zone for zone in zones if (zone / "name").read_text().startswith("package")]
            self._packages = [_Package(zone, now_s) for zone in named]
        except (OSError, ValueError) as error:
            self._why = _reason(error)
        if not self._packages and not self._why:
            self._why = f"{root}: no processor package has an energy counter there"

    def sample(self, now_s: float) -> None:
        """Read all counters."""
        self._last_s = now_s
        for package in self._packages:
            package.sample(now_s)

    def keep_up(self, now_s: float) -> None:
        """Read all counters if it is time."""
        if now_s - self._last_s >= KEEP_UP_S:
            self.sample(now_s)

    def end(self, now_s: float) -> dict[str, Reading]:
        """A reading for each package, or one that says why there is none."""
        if self._why:
            return {"CPU": Reading(None, self._why)}
        self.sample(now_s)
        return {f"CPU {package.name}": package.reading(now_s) for package in self._packages}

    def joules(self, now_s: float) -> float | None:
        """`end`, all packages together."""
        return total(self.end(now_s).values()).joules


class _Package:
    def __init__(self, zone: Path, now_s: float) -> None:
        """OSError or ValueError where the counter cannot be read."""
        self.name = (zone / "name").read_text().strip()
        self._zone = zone
        self._range_uj = int((zone / "max_energy_range_uj").read_text())
        self._last_uj = self._read_uj()
        self._begun_s = self._last_s = now_s
        self._sum_uj = 0
        self._samples = 1
        self._longest_s = 0.0
        self._why = ""

    def sample(self, now_s: float) -> None:
        if self._why:
            return
        try:
            read_uj = self._read_uj()
        except (OSError, ValueError) as error:
            self._why = _reason(error)
            return
        gap_s = now_s - self._last_s
        if gap_s * MOST_W * 1e6 > self._range_uj:
            self._why = (
                f"{self._zone}: not read for {gap_s:.0f} s, in which the counter may have gone all the way round"
            )
        self._sum_uj += read_uj - self._last_uj + (self._range_uj if read_uj < self._last_uj else 0)
        self._last_uj, self._last_s = read_uj, now_s
        self._samples += 1
        self._longest_s = max(self._longest_s, gap_s)

    def reading(self, now_s: float) -> Reading:
        seconds = now_s - self._begun_s
        if not self._why and self._sum_uj <= 0:  # virtual machines show counters that stand still
            self._why = f"{self._zone / 'energy_uj'}: did not move in {seconds:.3f} s"
        if self._why:
            return Reading(None, self._why, seconds)
        return Reading(
            self._sum_uj / 1e6, seconds=seconds, source="counter", samples=self._samples, longest_gap_s=self._longest_s
        )

    def _read_uj(self) -> int:
        return int((self._zone / "energy_uj").read_text())


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return f"{error.filename}: may be read by root only; run as root, or have root allow it"
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}"
    return f"an energy counter holds no number ({error})"
