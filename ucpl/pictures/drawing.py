"""An SVG file as it grows: cells, texts and lines.

Each is escaped here and nowhere else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ucpl.pictures.look import COLOURS, DARK, HATCHINGS, HEATS, LIGHT, WARM, clipped, markup, mixed

__all__ = ["Box", "Drawing", "text_width"]

Box = tuple[float, float, float, float]  # x, y, width, height

CHARACTER, NARROW = 6.4, 3.6  # of a label
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif"
MONO = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
_LINES = ("", "M-2 2l4-4M0 8l8-8M6 10l4-4", "M-2 6l4 4M0 0l8 8M6-2l4 4", "M3 4h2M4 3v2M7 8h2M-1 0h2M8 7v2M0-1v2")


def text_width(text: str) -> float:
    """Pixels of a small text in the widest common font."""
    return sum(NARROW if c in " .,·:;|ijl()[]" else CHARACTER for c in text)


class Drawing:
    def __init__(self, width: float, title: str) -> None:
        self.width = width
        self.title = title
        self.items: list[str] = []
        self.shades: set[int] = set()
        self.heats: set[int] = set()

    def text(self, x: float, y: float, text: str, kind: str, *, title: str = "") -> None:
        shown = f"<title>{_lines(title)}</title>" if title and title != text else ""
        self.items.append(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{markup(text)}{shown}</text>')

    def rule(self, left: float, right: float, y: float) -> None:
        self.items.append(f'<path class="rule" d="M{_n(left)} {_n(y)}H{_n(right)}"/>')

    def cell(self, box: Box, shade: int | None, title: str = "", *, labels: tuple[str, ...] = ()) -> None:
        """Draw a rectangle with the first label that fits.

        Shade: None for parts that nobody holds.
        """
        x, y, width, height = box
        kind = "k" if shade is None else f"s{shade}"
        if shade is not None:
            self.shades.add(shade)
        shown = f"<title>{_lines(title)}</title>" if title else ""
        place = f'x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}"'
        self.items.append(
            f'<rect class="c {kind}" {place}>{shown}</rect>' if shown else f'<rect class="c {kind}" {place}/>'
        )
        fitting = [label for label in labels if label and height >= 11.5 and text_width(label) + 1.5 <= width]
        if fitting:
            middle = f'x="{_n(x + width / 2)}" y="{_n(y + height / 2 + 3.7)}"'
            self.items.append(f'<text class="l" {middle}>{markup(fitting[0])}</text>')

    def heat(self, box: Box, share: float, title: str, label: str) -> None:
        """Draw a cell whose colour shows its share of the largest.

        Its label says the same without the colour.
        """
        x, y, width, height = box
        level = 0 if share <= 0 else 1 + min(HEATS - 1, int(share * HEATS))
        self.heats.add(level)
        self.items.append(
            f'<rect class="c h{level}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}">'
            f"<title>{_lines(title)}</title></rect>"
        )
        if label and height >= 11.5 and text_width(label) + 1.5 <= width:
            self.items.append(
                f'<text class="l" x="{_n(x + width / 2)}" y="{_n(y + height / 2 + 3.7)}">{markup(label)}</text>'
            )

    def ribbon(
        self, left: tuple[float, float, float], right: tuple[float, float, float], shade: int, title: str
    ) -> None:
        """Draw a band by x, y and height of its ends."""
        (a, top, h), (b, end, k) = left, right
        middle = (a + b) / 2
        self.shades.add(shade)
        path = (
            f"M{_n(a)} {_n(top)}C{_n(middle)} {_n(top)} {_n(middle)} {_n(end)} {_n(b)} {_n(end)}V{_n(end + k)}"
            f"C{_n(middle)} {_n(end + k)} {_n(middle)} {_n(top + h)} {_n(a)} {_n(top + h)}Z"
        )
        self.items.append(
            f'<path class="c s{shade}" fill-opacity=".7" d="{path}"><title>{_lines(title)}</title></path>'
        )

    @contextlib.contextmanager
    def group(self, **told: str | int) -> Iterator[None]:
        """Group the drawings inside. `data-` attributes name their subject, for programs."""
        data = "".join(f' data-{name}="{markup(str(value))}"' for name, value in told.items())
        self.items.append(f"<g{data}>")
        yield
        self.items.append("</g>")

    def finished(self, height: float, *, paper: bool = True) -> str:
        """The file. paper: a picture in a page uses the page's own."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(height)}" '
            f'width="{_n(self.width)}" height="{_n(height)}" role="img">'
        )
        body = "\n".join(self.items)
        sheet = f'<rect class="paper" width="{_n(self.width)}" height="{_n(height)}"/>' if paper else ""
        title = f"<title>{markup(clipped(self.title, 200))}</title>"
        return f"{head}\n{title}\n<style>\n{self._style()}</style>\n<defs>{self._patterns()}</defs>\n{sheet}\n{body}\n</svg>\n"

    def _style(self) -> str:
        out = [
            f"text{{font:12px {FONT};fill:{LIGHT['ink']}}}",
            ".title{font-size:21px;font-weight:600}.title2{font-size:15px;font-weight:600}.state{font-weight:600}",
            ".small,.l,.strip,.end,.middle{font-size:10.5px}.l,.strip{text-anchor:middle}.l{pointer-events:none;paint-order:stroke;stroke-width:2px;stroke-opacity:.55}",
            f".name{{font:600 13px {MONO}}}",
            ".end{text-anchor:end}.middle{text-anchor:middle}"
            + _colours(LIGHT, self.shades)
            + _warm(LIGHT, self.heats),
            f"@media (prefers-color-scheme:dark){{text{{fill:{DARK['ink']}}}",
            f"{_colours(DARK, self.shades)}{_warm(DARK, self.heats)}}}",
        ]
        return "\n".join(out) + "\n"

    def _patterns(self) -> str:
        hatch = (
            '<pattern id="{id}" width="8" height="8" patternUnits="userSpaceOnUse">'
            '<rect class="{kind}" width="8" height="8"/><path class="{line}" d="{lines}"/></pattern>'
        )
        out = [hatch.format(id="pk", kind="fk", line="ek", lines=_LINES[1])]
        for shade in sorted(self.shades):
            n, lines = shade % len(COLOURS), _LINES[shade // len(COLOURS) % HATCHINGS]
            if lines:
                out.append(hatch.format(id=f"p{shade}", kind=f"f{n}", line=f"e{n}", lines=lines))
        return "".join(out)


def _colours(paper: dict[str, str], shades: set[int]) -> str:
    """Rules of one scheme of colours."""
    out = [
        f".paper{{fill:{paper['paper']}}}.faint,.small,.strip,.end,.middle{{fill:{paper['faint']}}}.l{{fill:{paper['ink']};stroke:{paper['paper']}}}"
        f".rule{{stroke:{paper['line']};stroke-opacity:.4}}.k{{fill:url(#pk);stroke:{paper['line']}}}"
        f".c{{stroke-width:.8}}.fk{{fill:{paper['none']}}}.ek{{stroke:{paper['line']};stroke-width:.7;stroke-opacity:.6}}"
    ]
    for n in sorted({s % len(COLOURS) for s in shades}):
        edge = mixed(COLOURS[n], paper["ink"], 0.75)
        out.append(
            f".f{n}{{fill:{mixed(COLOURS[n], paper['paper'])}}}"
            f".e{n}{{stroke:{edge};stroke-width:1;stroke-opacity:.55;fill:none}}"
        )
    for s in sorted(shades):
        n, hatched = s % len(COLOURS), s // len(COLOURS) % HATCHINGS
        fill = f"url(#p{s})" if hatched else mixed(COLOURS[n], paper["paper"])
        out.append(f".s{s}{{fill:{fill};stroke:{mixed(COLOURS[n], paper['ink'], 0.75)}}}")
    return "".join(out)


def _warm(paper: dict[str, str], heats: set[int]) -> str:
    """From nothing, the paper's own, to the most."""
    return "".join(
        f".h{n}{{fill:{mixed(WARM, paper['paper'], 0.75 * n / HEATS if n else 0)};"
        f"stroke:{paper['none'] if n == 0 else mixed(WARM, paper['ink'], 0.8)}}}"
        for n in sorted(heats)
    )


def _lines(title: str) -> str:
    """Lines of a title.

    Each name is on a line of its own, and breaks none.
    """
    return "\n".join(markup(line) for line in title.split("\n"))


def _n(x: float) -> str:
    """A number of an SVG.

    Two decimals are enough for the eye, not for a share of a large tensor.
    """
    return f"{x:.4f}".rstrip("0").rstrip(".")
