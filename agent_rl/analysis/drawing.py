"""What the charts of a report share: palette, frame, and how many points a curve may have."""

import math
from typing import Any

Chart = dict[str, Any]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's palette: told apart by colour-blind readers."""
MOST_POINTS = 600
"""Points of one curve; of a longer run every k-th step is drawn."""
STEP = "step"


def framed(id: str, section: str, title: str, note: str, unit: str, data: list[Any], **y: Any) -> Chart:
    layout = {"xaxis": {"title": {"text": STEP}}, "yaxis": {"title": {"text": unit}, **y}}
    return {"id": id, "section": section, "title": title, "note": note, "data": data, "layout": layout}


def thin(points: list[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    """At most `MOST_POINTS` of them, evenly, the last one included; values to six digits."""
    stride = math.ceil(len(points) / MOST_POINTS)
    kept = [*points[: -1 : max(stride, 1)], *points[-1:]]
    return [x for x, _ in kept], [float(f"{y:.6g}") for _, y in kept]
