"""Statistics of the tensors that each line computes, while the program runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor

from fxwrap.debugging.points import observed_points
from fxwrap.debugging.statistics import TensorStatistics, tensor_statistics
from fxwrap.errors import NonFiniteError
from fxwrap.runtime.operators import observing
from fxwrap.wrapper_ir import Program

ValueCheck: TypeAlias = Literal["nan", "inf", "stats"]
"""The values of the option `check_values`."""

EntryT = TypeVar("EntryT", bound=Callable[..., Any])


@dataclass(frozen=True)
class LineValues:
    """The values of one tensor of a line in the latest call; those of a loop are of its last iteration.

    Fields:
        number: the number of the line in its program.
        line: the line as text.
        handle: the handle of the call, as in `Compiled.provenance`.
        value: the name of the value.
        operators: the line's ATen operators.
        location: the place that computes the value in the model's source, as "file:line", or "".
        statistics: the statistics.
    """

    number: int
    line: str
    handle: str
    value: str
    operators: tuple[str, ...]
    location: str
    statistics: TensorStatistics

    def to_dict(self) -> dict[str, object]:
        """Returns the fields, for JSON."""
        return {**vars(self), "statistics": self.statistics.to_dict()}

    def __str__(self) -> str:
        where = f"  {self.location}" if self.location else ""
        return f"{self.number:4} %{self.value}: {self.statistics}  {', '.join(self.operators)}{where}"


class ProgramValues:
    """The values of a program's lines in its latest call, in the order in which they were computed."""

    def __init__(self, program: Program, check: ValueCheck) -> None:
        self.program = program
        self.check = check
        self._points = observed_points(program)
        self._latest: dict[int, LineValues] = {}

    @property
    def lines(self) -> tuple[LineValues, ...]:
        """The values by line, with the check "stats"; empty before the first call."""
        return tuple(self._latest.values())

    def first_nonfinite(self, *, nan_only: bool = False) -> LineValues | None:
        """Returns the first value with NaN or infinities, None without one."""
        for item in self.lines:
            if item.statistics.nan or (item.statistics.inf and not nan_only):
                return item
        return None

    def to_json(self) -> str:
        """Returns the values by line as JSON, and the number of the first line with NaN, null without one."""
        first = self.first_nonfinite(nan_only=True)
        rows = [item.to_dict() for item in self.lines]
        head = {"graph": self.program.name, "first_nan": None if first is None else first.number}
        return json.dumps({**head, "values": rows}, indent=1)

    def __str__(self) -> str:
        return "\n".join([f"{self.program.name}:", *map(str, self.lines)])

    def checking(self, entry: EntryT) -> EntryT:
        """Returns an entry whose calls are observed."""

        def run(*inputs: object) -> Any:
            latest: dict[int, LineValues] = {}
            with observing(lambda number, value: self._observe(latest, number, value)):
                result = entry(*inputs)
            self._latest = latest
            return result

        return run  # type: ignore[return-value]

    def _observe(self, latest: dict[int, LineValues], number: int, value: Tensor) -> None:
        if self.check != "stats" and not _has_nonfinite(value, self.check):
            return
        point = self._points[number]
        origin = point.origin
        statistics = tensor_statistics(value)
        latest.pop(number, None)  # the latest value of a loop comes last
        latest[number] = LineValues(
            point.line_number, point.text, origin.handle, point.value.name, origin.operators, point.location, statistics
        )
        if self.check != "stats":
            raise NonFiniteError(
                self.program.name, point.text, point.location, origin.operators, statistics.nan, statistics.inf,
                f"%{point.value.name} is {statistics}",
            )  # fmt: skip


def _has_nonfinite(value: Tensor, check: ValueCheck) -> bool:
    if not (value.dtype.is_floating_point or value.dtype.is_complex) or value.is_meta:
        return False
    return bool(value.isnan().any()) if check == "nan" else not bool(value.isfinite().all())
