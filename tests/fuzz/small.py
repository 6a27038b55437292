"""A model of a few hundred bytes in two stored layouts.

Plans and targets are bent from it.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import torch

import ucpl
from ucpl.cli import main

SPEC = """ucpl 1
model own {
  dim l = 3, h = 4, f = 7
  up   : l f h
  norm : h
  mean : h
  part : h dtype f64
  dtype f32
}
layout whole() of own {
  framework torch()
  file weights = torch "whole.pt"
  up   = l f h  as "up"
  norm = h      as "norm"
  mean = h      as "mean"
  part = h      as "part"
}
layout cut(tp, pp = 1) of own {
  framework torch()
  mesh pp tp
  index l = l@spread(pp)
  file weights = torch "stage_{pp}_{tp:02}.pt"
  up[l] = f@spread(tp) h         as "{l}.up"
  norm  = h           at pp[-1]  as "norm"
  mean  = h mean @tp  at pp[0]   as "mean"
  part  = h any @tp   at pp[0]   as "part"
}
"""


def stored(folder: Path) -> tuple[Path, Path]:
    """(spec, folder of `whole()`) below a folder."""
    spec, whole = folder / "own.ucpl", folder / "whole"
    spec.write_text(SPEC)
    whole.mkdir(exist_ok=True)
    counted = {"up": (3, 7, 4), "norm": (4,), "mean": (4,)}
    values = {n: torch.arange(float(torch.Size(s).numel())).reshape(s) for n, s in counted.items()}
    torch.save({**values, "part": torch.arange(4.0, dtype=torch.float64)}, whole / "whole.pt")
    return spec, whole


def cut(folder: Path) -> tuple[Path, Path]:
    """(spec, folder of `cut(tp = 2)`) below a folder."""
    spec, whole = stored(folder)
    if not (folder / "cut").exists():
        ucpl.convert(whole, folder / "cut", f"{spec}:cut(tp = 2)", layout=f"{spec}:whole()", workers=1)
    return spec, folder / "cut"


def verb(*argv: object) -> tuple[int, str]:
    """(status, output) of a verb in this process.

    Raises: the verb's exceptions, ours and any other.
    """
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main([str(argv[0]), "--debug", *map(str, argv[1:])])
    return status, out.getvalue()
