"""The style of pictures: colours for the colour-blind, hatchings, numbers, names.

Numbers and names are texts.
"""

from __future__ import annotations

from html import escape

__all__ = [
    "FAMILIES",
    "Shade",
    "amount_text",
    "binary_text",
    "clipped",
    "count_text",
    "markup",
    "mixed",
    "printable",
    "shade_of",
    "share_text",
]

# Okabe and Ito's colours: distinct with all common kinds of colour-blindness. The last is grey.
COLOURS = ("#E69F00", "#56B4E9", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7", "#8C8C8C")
HATCHINGS = 4  # none, rising, falling, level
FAMILIES = len(COLOURS) * HATCHINGS

HEATS, WARM = 8, COLOURS[4]  # how many shades of one colour say an amount

LIGHT = {"paper": "#ffffff", "ink": "#1b1f24", "faint": "#57606a", "line": "#8c959f", "none": "#eaeef2"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#9da7b1", "line": "#6e7681", "none": "#21262d"}
TINT = 0.5  # the strength of a fill colour: a label on it is readable in both themes

Shade = int  # below FAMILIES


def shade_of(number: int) -> Shade:
    """Colours first; the same colour once more has another hatching."""
    return number % FAMILIES


def mixed(colour: str, paper: str, share: float = TINT) -> str:
    """So much of a colour on a paper: `#rrggbb`."""
    parts = [(int(colour[i : i + 2], 16), int(paper[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * share + b * (1 - share)):02x}" for a, b in parts)


def printable(text: str) -> str:
    """Replace characters that turn or break a line.

    Names come from files that anybody may have written.
    """
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def markup(text: str) -> str:
    """Escape a text for SVG and HTML.

    It ends no element and no attribute, and is one line.
    """
    return escape(printable(text), quote=True)


def clipped(text: str, most: int) -> str:
    """Shorten a text in the middle, since names differ at their ends."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return f"{text[: most - 1 - tail]}…{text[len(text) - tail :]}"


def count_text(n: int) -> str:
    """`12,345`, `1.23 M`, `405 G`: three digits of large numbers."""
    if n < 100_000:
        return f"{n:,}"
    for power, unit in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if n >= 10**power:
            value = n / 10**power
            return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return str(n)


def amount_text(n: int, unit: str) -> str:
    """`12.5 GB`, `1,234 elements`."""
    text = count_text(n)
    if unit != "B":
        return f"{text} {unit}"
    return f"{text}B" if text[-1].isalpha() else f"{text} bytes"


def binary_text(n: int) -> str:
    """`171 KiB`, `12.7 GiB`: as tables of the command line have bytes."""
    size, unit = float(n), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def share_text(part: int, whole: int) -> str:
    """`12.5 %` of a total."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.1:
        return "< 0.1 %"
    return f"{share:.3g} %"
