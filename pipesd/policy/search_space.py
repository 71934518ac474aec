"""Boxes of settings: parameters with their bounds, and the unit cube that a search moves in."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from pipesd.errors import UsageError
from pipesd.policy.gp import Array

Value = float | int
Setting = dict[str, Value]

MOST_PARAMETERS = 20
LARGEST = 1e15  # what a bound may be: beyond it neighbouring whole numbers are one float


@dataclass(frozen=True)
class Parameter:
    """A number between two bounds, both included; equal bounds make it fixed.

    Args:
        low, high: the bounds.
        integer: whole numbers only, which come out as int; otherwise as float.
        log: ratios count, not differences: 1 to 10 is as far as 10 to 100. Needs a low above 0.

    Raises UsageError for bounds that are in the wrong order, not finite or no numbers.
    """

    low: float
    high: float
    integer: bool = False
    log: bool = False

    def __post_init__(self) -> None:
        bounds: tuple[Any, Any] = (self.low, self.high)
        for bound in bounds:
            real = isinstance(bound, Real) and not isinstance(bound, bool)
            if not real or not abs(bound) <= LARGEST:
                raise UsageError(f"bounds: got {bound!r}, wanted a number, at most {LARGEST:g} in size")
            if self.integer and not float(bound).is_integer():
                raise UsageError(f"bounds: got {bound!r} for an integer parameter, wanted a whole number")
        if self.low > self.high:
            raise UsageError(f"bounds: got {self.low!r} to {self.high!r}, wanted the lower one first")
        if self.log and self.low <= 0:
            raise UsageError(f"bounds: got {self.low!r} for a parameter searched by ratios, wanted more than 0")
        kind = int if self.integer else float
        object.__setattr__(self, "low", kind(self.low))
        object.__setattr__(self, "high", kind(self.high))

    @property
    def fixed(self) -> bool:
        return self.low == self.high

    def value(self, unit: float) -> Value:
        """The value at a place of [0, 1], never outside the bounds."""
        low, high = self._ends()
        number = low + (high - low) * unit
        if self.log:
            number = math.exp(number)
        if self.integer:
            number = math.floor(number + 0.5)
        return min(max(number, self.low), self.high)

    def unit(self, value: Value) -> float:
        """The place of a value in [0, 1]; 0.5 if it is fixed."""
        if self.fixed:
            return 0.5
        low, high = self._ends()
        share = ((math.log(value) if self.log else value) - low) / ((high - low) or 1.0)
        return min(max(share, 0.0), 1.0)

    def checked(self, name: str, value: Any) -> Value:
        """The value as int or float. Raises UsageError, which names it, for one that the parameter cannot have."""
        wanted = f"{'a whole number' if self.integer else 'a number'}, {self.low!r} to {self.high!r}"
        real = isinstance(value, Real) and not isinstance(value, bool)
        if not real or not self.low <= value <= self.high:
            raise UsageError(f"{name}: got {value!r}, wanted {wanted}")
        if not self.integer:
            return float(value)
        if not isinstance(value, Integral) and not float(value).is_integer():
            raise UsageError(f"{name}: got {value!r}, wanted {wanted}")
        return int(value)

    def _ends(self) -> tuple[float, float]:
        """What the places 0 and 1 stand for. A whole number has a cell of its own, half a unit to either side."""
        margin = 0.5 if self.integer else 0.0
        low, high = self.low - margin, self.high + margin
        return (math.log(low), math.log(high)) if self.log else (low, high)


def _pair(bounds: Any) -> tuple[Any, Any]:
    low, high = bounds
    return low, high


class SearchSpace:
    """Named parameters. Points are arrays over the *free* ones, those that are not fixed, in the unit cube."""

    def __init__(self, parameters: Mapping[str, Parameter | tuple[float, float]]) -> None:
        if not isinstance(parameters, Mapping) or not 1 <= len(parameters) <= MOST_PARAMETERS:
            raise UsageError(f"search space: got {parameters!r}, wanted 1 to {MOST_PARAMETERS} named parameters")
        self.parameters: dict[str, Parameter] = {}
        for name, bounds in parameters.items():
            if not isinstance(name, str):
                raise UsageError(f"search space: got the name {name!r}, wanted a text")
            try:
                parameter = bounds if isinstance(bounds, Parameter) else Parameter(*_pair(bounds))
            except (TypeError, ValueError):
                raise UsageError(f"{name}: got {bounds!r}, wanted a pair (low, high) or a Parameter") from None
            except UsageError as error:
                raise UsageError(f"{name}: {error}") from None
            self.parameters[name] = parameter
        self.names = tuple(self.parameters)
        self._free = [parameter for parameter in self.parameters.values() if not parameter.fixed]
        self._integers = [column for column, parameter in enumerate(self._free) if parameter.integer]

    @property
    def free(self) -> int:
        """How many parameters are free, or 1 where none is: points then have a coordinate that nothing depends on."""
        return max(len(self._free), 1)

    def checked(self, setting: Mapping[str, Any]) -> Setting:
        """The setting with its values as int and float. Raises UsageError for one that is not of this space."""
        if not isinstance(setting, Mapping) or set(setting) != set(self.names):
            raise UsageError(f"setting: got {setting!r}, wanted values of {', '.join(self.names)}")
        return {name: parameter.checked(name, setting[name]) for name, parameter in self.parameters.items()}

    def setting(self, units: Sequence[float]) -> Setting:
        """The setting at a place of the unit cube over all parameters."""
        pairs = zip(self.parameters.items(), units, strict=True)
        return {name: parameter.value(unit) for (name, parameter), unit in pairs}

    def of_free(self, point: Array) -> Setting:
        """The setting at a point."""
        coordinates = iter(point.tolist())
        return {
            name: parameter.value(0.5 if parameter.fixed else next(coordinates))
            for name, parameter in self.parameters.items()
        }

    def unit(self, setting: Setting) -> Array:
        """The point of a setting."""
        values = [parameter.unit(setting[name]) for name, parameter in self.parameters.items() if not parameter.fixed]
        return np.array(values or [0.5], dtype=float)

    def snap(self, points: Array) -> Array:
        """The points (m, free), each moved to where its integers really are."""
        for column in self._integers:
            parameter = self._free[column]
            places = points[:, column]
            points[:, column] = [parameter.unit(parameter.value(place)) for place in places.tolist()]
        return points

    def spread(self, count: int, shift: Array, skip: int) -> Array:
        """Points (count, free) that fill the cube evenly: those from number `skip` on of the additive sequence of the
        plastic number's kin, which fills one dimension by the golden ratio, moved round by `shift`."""
        ratio = 1.5
        for _ in range(40):
            ratio = (1.0 + ratio) ** (1.0 / (self.free + 1))
        steps = ratio ** -np.arange(1.0, self.free + 1)
        return (shift + np.arange(skip, skip + count)[:, None] * steps) % 1.0
