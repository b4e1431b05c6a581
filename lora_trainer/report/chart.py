"""Charts as values: the positions of lines, ticks and marks. The template draws them.

Places are per mille of the plot's width from the left and of its height from the top, so that a
plot may have any size on the page while its labels stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import itemgetter

MOST_POINTS = 600  # of a line: more cannot be seen, and only make the page heavy
MOST_TICKS = 5
Point = tuple[float, float]  # step, value
value_of = itemgetter(1)


@dataclass(frozen=True)
class ChartLine:
    """One curve to draw; `style` is its CSS class (`raw`, `main`, `other`, `a` to `f`)."""

    name: str
    points: Sequence[Point]
    style: str = "main"


@dataclass(frozen=True)
class Mark:
    """A point with a name, such as the best validation loss."""

    name: str
    point: Point


@dataclass(frozen=True)
class Tick:
    """A label and its place in per mille."""

    label: str
    place: float


@dataclass(frozen=True)
class Drawn:
    """A line's path for SVG, the single points that no line reaches, and the numbers for a read-out."""

    name: str
    style: str
    path: str
    dots: tuple[Point, ...]
    points: tuple[Point, ...]


@dataclass(frozen=True)
class Placed:
    """A mark with its place in per mille."""

    name: str
    left: float
    top: float


@dataclass(frozen=True)
class Chart:
    """All that the template needs to draw one plot."""

    key: str
    title: str
    unit: str
    summary: str
    lines: tuple[Drawn, ...]
    marks: tuple[Placed, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    first: float
    last: float
    over: str = "step"  # what the labels at the lower side are

    @property
    def readout(self) -> list[dict[str, object]]:
        """The numbers under the pointer, for the page's script."""
        return [{"name": line.name, "points": line.points} for line in self.lines]


def make_chart(
    key: str,
    title: str,
    lines: Sequence[ChartLine],
    *,
    unit: str = "",
    marks: Sequence[Mark] = (),
    log: bool = False,
    from_zero: bool = False,
) -> Chart | None:
    """Lay out the lines over steps; None when there is nothing to draw. Values that are not finite leave gaps.

    `log` leaves out values that are not above 0.
    """
    if log:
        lines = [
            replace(line, points=[(step, value if value > 0 else math.nan) for step, value in line.points])
            for line in lines
        ]
    seen = [point for line in lines for point in line.points if math.isfinite(point[1])]
    if not seen:
        return None
    first, last = min(seen)[0], max(seen)[0]
    low, high = value_range(min(map(value_of, seen)), max(map(value_of, seen)), log=log, from_zero=from_zero)
    across = Axis(first, last if last > first else first + 1, log=False)
    up = Axis(low, high, log=log)
    ticks = up.ticks()
    return Chart(
        key=key,
        title=title,
        unit=unit,
        summary=summary_of(lines),
        lines=tuple(draw(line, across, up) for line in lines if line.points),
        marks=tuple(
            Placed(mark.name, across.place(mark.point[0]), 1000 - up.place(mark.point[1]))
            for mark in marks
            if first <= mark.point[0] <= last and low <= mark.point[1] <= high
        ),
        x_ticks=tuple(Tick(f"{tick:,.0f}", across.place(tick)) for tick in step_ticks(first, last)),
        y_ticks=tuple(
            Tick(label, 1000 - up.place(tick)) for tick, label in zip(ticks, tick_labels(ticks), strict=True)
        ),
        first=first,
        last=last,
    )


@dataclass(frozen=True)
class Axis:
    """From a value to its place, linear or logarithmic."""

    low: float
    high: float
    log: bool

    def place(self, value: float) -> float:
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(1000 * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        if self.log:
            return log_ticks(self.low, self.high)
        return linear_ticks(self.low, self.high)


def value_range(low: float, high: float, *, log: bool, from_zero: bool) -> tuple[float, float]:
    """A little more than what is shown, never empty."""
    if log:
        return low / 1.15, high * 1.15
    if from_zero:
        low = min(0.0, low)
    margin = 0.06 * (high - low) or abs(high) * 0.5 or 1.0
    if from_zero and low == 0:
        return low, high + margin
    return low - margin, high + margin


def linear_ticks(low: float, high: float) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) inside the range."""
    rough = (high - low) / MOST_TICKS
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    count = math.floor(high / step + 1e-9)
    return [index * step for index in range(math.ceil(low / step - 1e-9), count + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten, with 2 and 5 between them where there is room; even steps where hardly any would be."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in ticks if low <= tick <= high]
        if 2 <= len(inside) <= MOST_TICKS + 2:
            return inside
    if not inside:
        return linear_ticks(low, high)
    return inside[:: math.ceil(len(inside) / MOST_TICKS)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """As few digits as show each tick precisely, the same for all."""
    close = 1e-3 * min((abs(after - before) for before, after in pairwise(ticks)), default=1.0)
    for digits in range(1, 12):
        labels = [f"{tick:.{digits}g}" for tick in ticks]
        if all(abs(float(label) - tick) <= close for label, tick in zip(labels, ticks, strict=True)):
            break
    if any("e-" in label for label in labels):  # one notation for all
        labels = [f"{float(label):.{digits - 1}e}" if float(label) else "0" for label in labels]
    return [plain(label) for label in labels]


def plain(label: str) -> str:
    """`1e-05` as 1e-5 and `1.2e+04` as 12,000."""
    mantissa, _, exponent = label.partition("e")
    if not exponent:
        return label
    if 0 < int(exponent) < 7:
        return f"{float(label):,.0f}"
    return f"{float(mantissa):g}e{int(exponent)}"


def step_ticks(first: float, last: float) -> list[float]:
    """Whole steps only."""
    if last - first < 1:
        return [first]
    return sorted({float(round(tick)) for tick in linear_ticks(first, last) if first <= round(tick) <= last})


def thinned(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most MOST_POINTS, keeping the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return tuple(points)
    width = math.ceil(len(points) * 2 / MOST_POINTS)
    kept: list[Point] = [points[0]]
    for start in range(1, len(points) - 1, width):
        stretch = points[start : min(start + width, len(points) - 1)]
        finite = [point for point in stretch if math.isfinite(point[1])]
        ends = {min(finite, key=value_of), max(finite, key=value_of)} if finite else {stretch[0]}
        kept.extend(sorted(ends))
    return (*kept, points[-1])


def draw(line: ChartLine, across: Axis, up: Axis) -> Drawn:
    """SVG path data: a new stretch after each gap."""
    points = thinned(line.points)
    parts: list[str] = []
    dots: list[Point] = []
    stretch: list[Point] = []
    for step, value in (*points, (math.nan, math.nan)):
        if math.isfinite(value):
            stretch.append((across.place(step), round(1000 - up.place(value), 1)))
            continue
        if len(stretch) == 1:
            dots.append(stretch[0])
        elif stretch:
            parts.append("M" + "L".join(f"{x:g} {y:g}" for x, y in stretch))
        stretch = []
    finite = tuple((step, float(f"{value:.4g}")) for step, value in points if math.isfinite(value))
    return Drawn(line.name, line.style, "".join(parts), tuple(dots), finite)


def smoothed(points: Sequence[Point]) -> list[Point]:
    """Exponential mean over about a twentieth of the curve, and at least five points, without the pull of its first value (Adam's correction)."""
    window = max(5.0, len(points) / 20)
    keep = 1 - 2 / (window + 1)
    total, weight = 0.0, 0.0
    result = []
    for step, value in points:
        if math.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        result.append((step, total / weight if weight else math.nan))
    return result


def summary_of(lines: Sequence[ChartLine]) -> str:
    """A description of the plot for screen readers."""
    parts = []
    for line in lines:
        finite = [point for point in line.points if math.isfinite(point[1])]
        if finite:
            lowest, highest = min(finite, key=value_of), max(finite, key=value_of)
            parts.append(
                f"{line.name}: from {short(finite[0][1])} at step {finite[0][0]:g}"
                f" to {short(finite[-1][1])} at step {finite[-1][0]:g},"
                f" lowest {short(lowest[1])} at step {lowest[0]:g}, highest {short(highest[1])} at step {highest[0]:g}"
            )
    return ". ".join(parts) + "."


def short(value: float | None) -> str:
    """A number as people read it, three digits of it: 0.0714, 1.5e-5, 2,400."""
    if value is None or not math.isfinite(value):
        return "not finite"
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return plain(f"{value:.3g}")
