"""Shapes as SVG inside the page: styled by classes alone, as the policy forbids anything else."""

from __future__ import annotations

from markupsafe import Markup

from kprof.report.partner.parts import Box, Drawing, Mark, Shape, Stroke


def to_svg(drawing: Drawing, style: str, label: str) -> Markup:
    """Return a drawing as an SVG element; `label` is what is read out in its place."""
    body = Markup("").join(_element(shape) for shape in drawing.shapes)
    return Markup('<svg class="{}" viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>').format(
        style, _number(drawing.width), _number(drawing.height), label, body
    )


def bar_svg(share: float) -> Markup:
    """Return a plain bar of a table: so much of 100 units."""
    length = _number(100 * min(max(share, 0.0), 1.0))
    return Markup(
        '<svg class="bar" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        '<rect class="k0" x="0" y="0" width="{}" height="8"/></svg>'
    ).format(length)


def swatch_svg(style: str) -> Markup:
    """Return what stands before a name in a legend: the fill, or the symbol where one is named."""
    fill, _, symbol = style.partition(" ")
    shape: Shape = Box(1, 1, 14, 14, fill)
    if symbol:
        shape = Mark(8, 8, 12, symbol, fill)  # type: ignore[arg-type]
    return Markup('<svg class="swatch" viewBox="0 0 16 16" aria-hidden="true">{}</svg>').format(
        _element(shape)
    )


def _element(shape: Shape) -> Markup:
    if isinstance(shape, Box):
        return _with_tip(
            Markup('<rect class="{}" x="{}" y="{}" width="{}" height="{}"').format(
                shape.style, *map(_number, (shape.x, shape.y, shape.width, shape.height))
            ),
            "rect",
            shape.tip,
        )
    if isinstance(shape, Stroke):
        points = " ".join(f"{_number(x)},{_number(y)}" for x, y in shape.points)
        return Markup('<polyline class="{}" points="{}"/>').format(shape.style, points)
    if isinstance(shape, Mark):
        return _with_tip(_symbol(shape), "path", shape.tip)
    anchor = "" if shape.anchor == "start" else Markup(' text-anchor="{}"').format(shape.anchor)
    style = Markup(' class="{}"').format(shape.style) if shape.style else ""
    return Markup('<text x="{}" y="{}"{}{}>{}</text>').format(
        _number(shape.x), _number(shape.y), anchor, style, shape.text
    )


def _with_tip(opening: Markup, name: str, tip: str) -> Markup:
    if not tip:
        return opening + Markup("/>")
    return opening + Markup("><title>{}</title></{}>").format(tip, name)


def _symbol(mark: Mark) -> Markup:
    x, y, r = mark.x, mark.y, mark.size / 2
    half = f"a{_number(r)} {_number(r)} 0 1 0"
    paths = {
        "circle": f"M{_number(x - r)} {_number(y)}"
        f"{half} {_number(2 * r)} 0{half} {_number(-2 * r)} 0z",
        "square": _polygon(x, y, r * 0.9, ((-1, -1), (1, -1), (1, 1), (-1, 1))),
        "triangle": _polygon(x, y, r * 1.1, ((0, -1), (0.95, 0.8), (-0.95, 0.8))),
        "diamond": _polygon(x, y, r * 1.1, ((0, -1), (1, 0), (0, 1), (-1, 0))),
        "cross": f"M{_number(x - r)} {_number(y - r)}L{_number(x + r)} {_number(y + r)}"
        f"M{_number(x - r)} {_number(y + r)}L{_number(x + r)} {_number(y - r)}",
    }
    style = f"{mark.style} stroke" if mark.symbol == "cross" else f"{mark.style} mark"
    return Markup('<path class="{}" d="{}"').format(style, paths[mark.symbol])


def _polygon(x: float, y: float, r: float, corners: tuple[tuple[float, float], ...]) -> str:
    return "M" + "L".join(f"{_number(x + r * a)} {_number(y + r * b)}" for a, b in corners) + "z"


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") or "0"
