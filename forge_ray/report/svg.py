"""Line charts as inline SVG: no script, no fonts or files from elsewhere, colours from the page's CSS variables.

`chart` draws lines over one x axis of integers (steps), each with an optional band, and points with error bars. Gaps (None) break a line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 300
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 16, 40


@dataclass(frozen=True)
class Line:
    """A curve. `y` has one value per x; `half` the half width of a band around it."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    half: Sequence[float | None] | None = None
    colour: str = "var(--one)"


@dataclass(frozen=True)
class Points:
    """Single values with error bars: `(x, y, low, high)`."""

    name: str
    values: Sequence[tuple[float, float, float, float]]
    colour: str = "var(--two)"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from at most `low` to at least `high`, steps of 1, 2 or 5 times a power of ten."""
    span = high - low if high > low else max(abs(high), 1.0)
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    count = max(1, math.ceil(high / step - 1e-9) - first)
    return [round((first + index) * step, 12) for index in range(count + 1)]


def label(value: float) -> str:
    """A tick's text: short, and scientific where the number is tiny or huge."""
    if value and not 1e-3 <= abs(value) < 1e5:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.10g}"


def chart(
    lines: Sequence[Line],
    points: Sequence[Points] = (),
    *,
    y_label: str,
    x_label: str = "step",
    y_range: tuple[float, float] | None = None,
) -> str:
    """The SVG element; a sentence where there is nothing to draw."""
    known = [(x, y) for line in lines for x, y in zip(line.x, line.y, strict=True) if y is not None]
    known += [(x, bound) for group in points for x, _, low, high in group.values for bound in (low, high)]
    if not known:
        return '<p class="empty">nothing was measured</p>'
    xs = [x for x, _ in known]
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = x_low - 1, x_high + 1
    if y_range is None:
        y_range = (min(0.0, *(y for _, y in known)), max(y for _, y in known))
    y_ticks = ticks(*y_range)
    y_low, y_high = y_ticks[0], y_ticks[-1]

    def px(x: float) -> float:
        return LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def py(y: float) -> float:
        return TOP + (y_high - min(max(y, y_low), y_high)) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(y_label)} by {escape(x_label)}">']
    for tick in y_ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py(tick):.1f}" y2="{py(tick):.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{py(tick) + 4:.1f}" text-anchor="end">{label(tick)}</text>')
    for tick in ticks(x_low, x_high, 10):
        if x_low <= tick <= x_high and tick == int(tick):
            parts.append(f'<text class="tick" x="{px(tick):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{int(tick)}</text>')
    parts.append(f'<text class="axis" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    turned = f'transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text class="axis" {turned}>{escape(y_label)}</text>')
    for line in lines:
        for stretch in _stretches(line):
            band = [(x, y, half) for x, y, half in stretch if half is not None]
            if len(band) > 1:
                edge = [f"{px(x):.1f},{py(y + half):.1f}" for x, y, half in band] + [
                    f"{px(x):.1f},{py(y - half):.1f}" for x, y, half in reversed(band)
                ]
                parts.append(f'<polygon points="{" ".join(edge)}" style="fill:{line.colour}" opacity="0.16"/>')
            path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y, _ in stretch)
            parts.append(f'<polyline points="{path}" style="stroke:{line.colour}" class="curve"/>')
            for x, y, half in stretch:
                text = f"{line.name}, {x_label} {x:g}: {y:.4g}" + (f" ± {half:.3g}" if half is not None else "")
                parts.append(
                    f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="2.6" style="fill:{line.colour}"><title>{escape(text)}</title></circle>'
                )
    for group in points:
        for x, y, low, high in group.values:
            text = f"{group.name}, {x_label} {x:g}: {y:.3f} [{low:.3f}, {high:.3f}]"
            bar = f'<path d="M{px(x):.1f} {py(high):.1f}V{py(low):.1f}" style="stroke:{group.colour}" stroke-width="2"/>'
            dot = f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="5.5" class="point" style="fill:{group.colour}"/>'
            parts.append(f"<g>{bar}{dot}<title>{escape(text)}</title></g>")
    parts.append("</svg>")
    legend = [(line.name, line.colour) for line in lines] + [(group.name, group.colour) for group in points if group.values]
    if len(legend) > 1:
        keys = "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in legend)
        parts.append(f'<p class="legend">{keys}</p>')
    return "".join(parts)


def _stretches(line: Line) -> list[list[tuple[float, float, float | None]]]:
    """The parts of a line between its gaps."""
    stretches: list[list[tuple[float, float, float | None]]] = [[]]
    for index, (x, y) in enumerate(zip(line.x, line.y, strict=True)):
        if y is None:
            stretches.append([])
        else:
            stretches[-1].append((x, y, line.half[index] if line.half else None))
    return [stretch for stretch in stretches if stretch]
