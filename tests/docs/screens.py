"""Takes the screens of docs/PICTURES.md anew, in headless Chromium: python -m tests.docs.screens

Next to them, screens.json keeps the digest of each screen's page: a screen whose page has changed is an
old one, and a test says so. CHROMIUM names the browser (default: chromium).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path

from tests.cli.command import good
from tests.docs.blocks import ROOT
from tests.docs.pictures import FOLDER
from ucpl.records import frozen

__all__ = ["KEPT", "SCREENS", "Screen", "digest", "page_of"]

KEPT = FOLDER / "screens.json"
FOUND = """
var f=document.getElementById('find');f.value='1105';f.dispatchEvent(new Event('input'));
var c=[...document.querySelectorAll('[title]')].find(e=>e.title.startsWith('attn.v[l=8..16, g=1,'));
c.dispatchEvent(new Event('mouseover',{bubbles:true}));
"""


@frozen
class Screen:
    """page: a page of the folder, or the output of `ucpl show PAGE --html`.

    done: the user's actions before the screen.
    """

    page: str
    width: int
    height: int
    done: str = ""


SCREENS = {
    "page-405b.png": Screen("benchmarks/llama.ucpl:megatron(tp=8, pp=16, dp=128)", 1280, 1000, FOUND),
    "page-narrow-checkpoint.png": Screen("checkpoint.html", 480, 900),
    "page-narrow-layout.png": Screen("layout-2x2x2.html", 480, 900),
    "page-narrow-plan.png": Screen("plan-grow.html", 480, 1200),
}


def page_of(screen: Screen) -> bytes:
    """The current page; for one that another test compares, the stored one."""
    if screen.page.endswith(".html"):
        return (FOLDER / screen.page).read_bytes()
    with tempfile.TemporaryDirectory() as top, contextlib.chdir(ROOT):
        good("show", screen.page, "--html", Path(top, "page.html"))
        return Path(top, "page.html").read_bytes()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def taken(screen: Screen, page: bytes) -> bytes:
    """A PNG of the page, after the actions in it."""
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.decode())  # it lets no other script run
    text = text.replace("</body>", f"<script>{screen.done}</script></body>")
    with tempfile.TemporaryDirectory() as top:
        Path(top, "page.html").write_text(text, encoding="utf-8")
        command = [os.environ.get("CHROMIUM", "chromium"), "--headless=new", "--no-sandbox", "--disable-gpu"]
        command += ["--hide-scrollbars", f"--window-size={screen.width},{screen.height}", "--force-color-profile=srgb"]
        command += [f"--user-data-dir={top}/profile", f"--screenshot={top}/screen.png", f"file://{top}/page.html"]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return Path(top, "screen.png").read_bytes()


def main() -> None:
    kept = {}
    for name, screen in SCREENS.items():
        page = page_of(screen)
        picture = taken(screen, page)
        (FOLDER / name).write_bytes(picture)
        kept[name] = {"page": digest(page), "screen": digest(picture)}
    KEPT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
