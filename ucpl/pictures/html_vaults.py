"""The picture of a vault, as one HTML page: the drawing, and what it says as a table."""

from __future__ import annotations

from ucpl.pictures.page import page, tag
from ucpl.pictures.svg_vaults import vault_svg
from ucpl.pictures.vaults import VaultPicture, bytes_said

__all__ = ["vault_html"]


def vault_html(picture: VaultPicture) -> str:
    """One file. Raises nothing: names are whatever they are."""
    title = f"A vault of {picture.call}"
    rows = [
        f"<tr>{tag('th', f'd{d.number}')}{tag('td', ', '.join(map(str, d.ranks)))}{tag('td', bytes_said(d))}</tr>"
        for d in picture.domains
    ]
    body = [tag("h1", title), tag("p", picture.said()), f'<div class="wide">{vault_svg(picture, paper=False)}</div>']
    body += [tag("p", line) for line in picture.survived]
    body.append(
        f'<table class="lined"><tr>{tag("th", "domain")}{tag("th", "ranks")}{tag("th", "a slot")}</tr>{"".join(rows)}</table>'
    )
    return page(title, "\n".join(body))
