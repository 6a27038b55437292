"""Names that would drive a terminal or forge a line of output.

They are names of tensors, files, folders, layouts, in every verb.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.command import good, ucpl
from ucpl.cli.console import Console

ESCAPES = "\x1b[2J\x9b31m\u202e\u2066\x07\x7f\u2028\r"  # CSI of 7 and 8 bits, BiDi, a bell, a line of Unicode
FORGED = "FORGED         sound"
NAME = f"w{ESCAPES}\n{FORGED}.weight"


@pytest.fixture(params=["huggingface", "plain", "torch"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = tmp_path / f"a{ESCAPES}\n{FORGED}"
    folder.mkdir()
    if request.param == "huggingface":
        save_file({NAME: torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
        return folder
    if request.param == "plain":
        save_file({NAME: torch.arange(6.0).reshape(2, 3)}, folder / "model.safetensors")
        good("convert", folder, folder / ".." / "plain.pt", "--to", "plain()")
        return tmp_path / "plain.pt"
    (folder / "model.ucpl").write_text("model m {\n  w : 2 3\n}\n")
    torch.save({NAME: torch.ones(2)}, folder / f"x{ESCAPES}.pt")
    return folder


def demand_harmless(*argv: object) -> None:
    done = ucpl(*argv)
    for text in (done.out, done.err):
        odd = sorted({c for c in text if not c.isprintable() and c != "\n"})
        assert not odd, (argv[0], odd, text)
        assert not [line for line in text.splitlines() if line.startswith("FORGED")], (argv[0], text)
    assert "internal error" not in done.err, (argv[0], done.err)
    if "--json" in argv and done.out:
        json.loads(done.out)


@pytest.mark.fault(
    "Hostile input", "terminal escapes, BiDi marks and line breaks in names", "no output has them, no line is forged"
)
@pytest.mark.parametrize("more", [(), ("--json",)], ids=["people", "json"])
def test_no_name_drives_a_terminal_or_forges_a_line(checkpoint: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    plan, out = tmp_path / f"x{ESCAPES}\n{FORGED}.plan", tmp_path / f"out{ESCAPES}\n{FORGED}.pt"
    here = checkpoint, *more
    demand_harmless("inspect", "--tensors", *here)
    demand_harmless("infer", *here)
    demand_harmless("import", "hf", *here)
    demand_harmless("plan", "--to", "plain()", "-o", plan, "--rank", "0", *more, "--from", checkpoint)
    for stage in ("resolve", "locate", "build", "order"):
        demand_harmless("show", "--after", stage, *here)
    demand_harmless("show", plan, *more)
    demand_harmless("why", plan, f"{NAME}[0, 0]", *more)
    demand_harmless("why", plan, "nothing[0]", *more)
    demand_harmless("convert", checkpoint, out, "--to", "plain()", *more)
    demand_harmless("convert", checkpoint, out, "--to", "plain()", *more)
    demand_harmless("convert", checkpoint, out, "--to", "plain()", "--resume", *more)
    demand_harmless("convert", checkpoint, tmp_path / "y", "--to", "zero1(dp=2)", *more)
    demand_harmless("convert", checkpoint, tmp_path / "y", "--to", "plain()", "--drop", NAME, *more)
    demand_harmless("apply", plan, checkpoint, tmp_path / "z.pt", *more)
    demand_harmless("compare", checkpoint, out, *more)
    demand_harmless("verify", *here)
    for verb in ("check", "fmt", "roundtrip", "explain"):
        demand_harmless(verb, *here)


def test_texts_with_escapes_say_so_without_them(tmp_path: Path) -> None:
    path = tmp_path / f"t{ESCAPES}\n{FORGED}.ucpl"
    for text in (
        f'model m {{\n  "w{ESCAPES}" : 2 3\n}}\n',
        f"{ESCAPES}\n",
        f"# {ESCAPES}\nmodel m {{ w{ESCAPES} : 2 }}\n",
    ):
        path.write_text(text)
        for verb in ("check", "fmt", "show", "roundtrip"):
            demand_harmless(verb, path)
            demand_harmless(verb, path, "--json")


def test_a_config_with_escapes_says_so_without_them(tmp_path: Path) -> None:
    config = {"model_type": f"x{ESCAPES}\n{FORGED}", "architectures": [f"A{ESCAPES}\n{FORGED}"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    demand_harmless("import", "hf", tmp_path / "config.json")
    demand_harmless("import", "hf", tmp_path)
    demand_harmless("inspect", tmp_path)


def test_a_target_that_looks_like_markup_has_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar is drawn on a terminal alone.

    `[/x]` closes a tag that is not open.
    """
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with Console().progress(f"runs[/x]/[red]{ESCAPES}") as told:
        assert told is not None
        told(1, 2)
    assert os.environ["TERM"] == "xterm"
