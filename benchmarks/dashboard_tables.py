"""The figures of the dashboard over recorded rows: pass rates, and geometric means beside TorchInductor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.results import Cell, Row, geometric_mean

INDUCTOR, OWN, AOT_EAGER = "inductor", "fxwrap", "aot_eager"
EAGER_FAILS = "-"
"""The status of a side where eager fails: the row does not count."""

RATIOS = (("speedup", "speedup"), ("compile", "compile, s"), ("memory", "peak, MB"))
"""Title and column of each measure that is compared with Inductor's in the same mode."""


def sides_of(rows: Sequence[Row]) -> list[str]:
    """Returns the sides of recorded rows, in order."""
    return [column.removesuffix(": status") for column in rows[0] if column.endswith(": status")]


def inductor_side(side: str) -> str:
    """Returns the side of Inductor in the mode of a side."""
    _, colon, mode = side.partition(":")
    return INDUCTOR + colon + mode


def summary(rows: Sequence[Row]) -> list[dict[str, Cell]]:
    """Returns a line for each mode, library and side: passing rows, mean speedup over eager, and ratios to Inductor's.

    Ratios are geometric means over the rows that both sides pass; of compile seconds and peak memory, less is better.
    The last columns are lower bounds of the compile time with any back end, over Inductor's whole compile seconds: all
    seconds of a side that are not its back end's (Dynamo, AOTAutograd, and the call itself), and Dynamo's alone.
    """
    groups = dict.fromkeys((row["mode"], row["library"]) for row in rows)
    lines: list[dict[str, Cell]] = []
    for mode, library in groups:
        members = [row for row in rows if (row["mode"], row["library"]) == (mode, library)]
        lines += [{"mode": mode, "library": library, **side_cells(members, side)} for side in sides_of(rows)]
    return lines


def side_cells(rows: Sequence[Row], side: str) -> dict[str, Cell]:
    """Returns the figures of a side over rows of one mode."""
    runnable = [row for row in rows if row[f"{side}: status"] != EAGER_FAILS]
    passing = [row for row in runnable if row[f"{side}: status"] == "pass"]
    cells: dict[str, Cell] = {"side": side, "passing": f"{len(passing)} of {len(runnable)}"}
    cells["speedup"] = _mean([value for row in passing if (value := _number(row, f"{side}: speedup"))])
    other = inductor_side(side)
    compared = [row for row in passing if row.get(f"{other}: status") == "pass"]
    for title, column in RATIOS:
        pairs = [(_number(row, f"{side}: {column}"), _number(row, f"{other}: {column}")) for row in compared]
        ratios = [own / its for own, its in pairs if own and its and other != side]
        cells[f"{title} / Inductor"] = _mean(ratios)
    compiled = [(row, its) for row in compared if (its := _number(row, f"{other}: compile, s"))]
    cells["front end / Inductor"] = _mean([part / its for row, its in compiled if (part := _front_end(row, side))])
    dynamo = [(_number(row, f"{side}: Dynamo, s"), its) for row, its in compiled]
    cells["Dynamo / Inductor"] = _mean([part / its for part, its in dynamo if part])
    return cells


def _front_end(row: Row, side: str) -> float | None:
    """Returns the compile seconds of a side that are not its back end's; None in rows without that part."""
    whole, part = _number(row, f"{side}: compile, s"), _number(row, f"{side}: back end, s")
    return whole - part if whole and part else None


def details(rows: Sequence[Row]) -> list[dict[str, Cell]]:
    """Returns a line for each row: eager's time, and each side's speedup, or its status where it does not pass."""
    lines = []
    for row in rows:
        line: dict[str, Cell] = {name: row[name] for name in ("model", "mode", "eager, ms")}
        for side in sides_of(rows):
            text = str(row[f"{side}: status"]).replace("|", "/").partition("\n")[0][:60]
            line[side] = row[f"{side}: speedup"] if text == "pass" else text
        lines.append(line)
    return lines


def worst(rows: Sequence[Row], side: str, count: int = 10) -> list[tuple[str, float]]:
    """Returns the rows whose speedup over Inductor's in the same mode is the smallest, with that ratio."""
    other = inductor_side(side)
    ratios = [
        (f"{row['model']} {row['mode']}", own / its) for row in rows
        if row[f"{side}: status"] == row.get(f"{other}: status") == "pass"
        and (own := _number(row, f"{side}: speedup")) and (its := _number(row, f"{other}: speedup"))
    ]  # fmt: skip
    return sorted(ratios, key=lambda item: item[1])[:count]


def _number(row: Mapping[str, Cell], column: str) -> float | None:
    value = row.get(column)
    return float(value) if isinstance(value, int | float) else None


def _mean(ratios: Sequence[float]) -> float | None:
    return geometric_mean(ratios) if ratios else None
