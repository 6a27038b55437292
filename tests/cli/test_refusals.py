"""Refusals that a user meets on the command line.

The code, and the words for file, tensor and remedy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.command import FIXTURES, ROOT, Done, alone, digest, good, ucpl
from ucpl.formats.megatron.legacy_names import layer_of

SOURCE = FIXTURES / "z1_dp4"

OWN = """ucpl 1
model m {
  dim a = 4
  dtype f32
  v : a
  u : a
}
layout one() of m {
  framework torch()
  file weights = torch "f.pt"
  v = a as "v"
  u = a as "u"
}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a checkpoint of two tensors, `src`, and its spec."""
    (tmp_path / "own.ucpl").write_text(OWN)
    (tmp_path / "src").mkdir()
    torch.save({"v": torch.arange(4.0), "u": torch.ones(4)}, tmp_path / "src" / "f.pt")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(done: Done, code: str, status: int, *words: str) -> None:
    assert (done.status, done.err.partition(":")[0]) == (status, f"error[{code}]"), done
    text = " ".join(done.err.split())
    assert [w for w in words if w not in text] == [], text


def to(layout: str, here: Path) -> Done:
    """The checkpoint as another layout of the same model."""
    (here / "own.ucpl").write_text(OWN + layout)
    return ucpl("convert", "src", "dst", "--from", "own.ucpl:one()", "--to", "own.ucpl:two()")


@pytest.mark.parametrize(("text", "why"), [("[1, 2]", "no JSON object"), ("{", "line 1"), ("\x00", "")])
def test_a_config_that_is_no_object(text: str, why: str, here: Path) -> None:
    (here / "config.json").write_text(text)
    done = ucpl("check", "own.ucpl", "--config", "config.json")
    said(done, "E176", 2, "config.json is no JSON object", "config.json", why, "help:")


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_that_is_not_there(rank: str) -> None:
    done = ucpl("plan", "--from", SOURCE, "--to", "zero1(dp=2)", f"--rank={rank}")
    said(done, "E180", 2, f"--rank {rank}: zero1(dp = 2", "has ranks 0 to 1", "help:")


def test_an_example_that_was_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucpl_resources(), "example_folder", lambda: tmp_path)
    said(ucpl("demo"), "E183", 3, f"{tmp_path / 'checkpoint'} is not there", "help:")


def ucpl_resources() -> object:
    return sys.modules["ucpl.resources"]


def test_a_hugging_face_folder_of_other_files(here: Path) -> None:
    layout = (
        "layout two() of m {\n  framework huggingface()\n"
        '  file weights = torch "model.bin"\n  v = a as "v"\n  u = a as "u"\n}\n'
    )
    said(
        to(layout, here), "E397", 1, "the form `torch`, and framework huggingface()", 'safetensors "model.bin"', "help:"
    )
    said(
        to(layout.replace('torch "model.bin"', 'safetensors "model"'), here),
        "E397",
        1,
        'write `torch "model"`',
        "help:",
    )
    assert sorted(os.listdir(here)) == ["own.ucpl", "src"]


def test_a_key_inside_a_tensor(here: Path) -> None:
    layout = (
        'layout two() of m {\n  framework torch()\n  file weights = torch "g.pt"\n  v = a as "x"\n  u = a as "x/y"\n}\n'
    )
    said(to(layout, here), "E392", 4, "x/y of g.pt is a tensor or a blob, and something else, too", "g.pt", "help:")
    turned = layout.replace('"x/y"', '"z"').replace('"x"', '"x/y"').replace('"z"', '"x"')
    said(to(turned, here), "E392", 4, "x of g.pt is a tensor or a blob, and something else, too", "help:")
    assert sorted(os.listdir(here)) == ["own.ucpl", "src"]


@pytest.mark.parametrize(
    ("line", "message"),
    [("  framework deepsped()\n", "no framework is called `deepsped`"), ("", "the layout names no framework")],
)
def test_a_framework_that_nobody_knows(line: str, message: str, here: Path) -> None:
    layout = f'layout two() of m {{\n{line}  file weights = torch "g.pt"\n  v = a as "v"\n  u = a as "u"\n}}\n'
    said(
        to(layout, here),
        "E436",
        2,
        message,
        "one of universal, deepspeed, ",
    )


def test_ctrl_c_before_and_while_tiles_are_written(tmp_path: Path) -> None:
    code = "import os; os.environ['UCPL_FAIL_AT'] = '{}'; from ucpl.cli import main; import sys; sys.exit(main())"
    command = ("convert", SOURCE, tmp_path / "new", "--to", "zero1(dp=2)")
    before = digest(SOURCE)
    done = alone(*command, code=code.format("tile-written:1:interrupt"))
    said(
        done,
        "E620",
        130,
        f"interrupted: {tmp_path / 'new'} is not there yet",
        "finished parts are kept here",
        "--resume",
    )
    assert not (tmp_path / "new").exists() and digest(SOURCE) == before
    good(*command, "--resume")
    assert (tmp_path / "new" / "latest").is_file()


@pytest.mark.parametrize("number", ["²", "9" * 5000, "٣"])
def test_what_looks_like_a_number_of_a_layer_and_is_none(tmp_path, number):
    """Python accepts digits that are no number, and limits long numbers."""
    pages = json.loads((ROOT / "tests/fixtures/numbered/pp2/names.json").read_text())
    pages[0][0][0] = f"{number}.w"
    (tmp_path / "names.json").write_text(json.dumps(pages))
    source = ROOT / "tests/fixtures/numbered/pp2"
    how = f'zero0(order="{tmp_path / "names.json"}")'
    done = ucpl("convert", source, tmp_path / "out", "--from", how, "--to", "plain()")
    assert done.status == 3 and "E466" in done.err, done.err
    assert layer_of(f"decoder.layers.{number}.mlp.weight") is None
    assert layer_of("decoder.layers.12.mlp.weight") == ("decoder.layers.", 12)
    done = ucpl("inspect", f"vault:{tmp_path}/job@{number}")
    assert done.status == 3 and "E692" in done.err, done.err
    done = ucpl("vault", "serve", tmp_path / "job", "--domain", number)
    assert done.status == 2 and "names no domain" in done.err, done.err


def test_plans_that_never_end_are_not_compared(tmp_path):
    (tmp_path / "zero.plan").symlink_to("/dev/zero")
    done = ucpl("diff", tmp_path / "zero.plan", tmp_path / "zero.plan")
    assert done.status == 5 and "E350" in done.err, done.err
