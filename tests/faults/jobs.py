"""The jobs on a failing machine.

Every verb that writes, and those that read checkpoints, on something small and real.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from attrs import frozen
from safetensors.torch import save_file

from tests.cli.command import FIXTURES, ROOT, good

__all__ = ["JOBS", "Job"]

ONE = "src"
OUT = "out"  # the output, in the folder `place`
TRAINER = FIXTURES.parent / "trainer" / "checkpoint-3"


@frozen
class Job:
    """A verb on something.

    `{top}` in its arguments is the folder that holds the source and `place`.

    writes: the name of its output in `place`; empty: it only reads. resumes: `--resume` is allowed.
    """

    name: str
    arguments: tuple[str, ...]
    make: Callable[[Path], None]
    writes: str = OUT
    resumes: bool = False
    old: str = ""  # an earlier text there, or "folder"

    def argv(self, top: Path, *, resume: bool = False) -> list[str]:
        more = ["--resume"] if resume and self.resumes else []
        return [part.format(top=top) for part in self.arguments] + more

    def lay_out(self, top: Path) -> None:
        """Source, and a place for the target."""
        (top / "place").mkdir(parents=True)
        self.make(top)
        out = top / "place" / self.writes
        if self.old == "folder":
            out.mkdir()
            (out / "old").write_text("old")
        elif self.old:
            out.write_text(self.old)


def _source(folder: Path) -> Callable[[Path], None]:
    def make(top: Path) -> None:
        shutil.copytree(folder, top / ONE)

    return make


def _trainer(top: Path) -> None:
    """A copy whose files of ranks differ."""
    shutil.copytree(TRAINER, top / ONE)
    torch.save({"rank": 1}, top / ONE / "rng_state_1.pth")


def _planned(top: Path) -> None:
    shutil.copytree(FIXTURES / "z1_dp4", top / ONE)
    good("plan", "--from", top / ONE, "--to", "zero1(dp=3)", "-o", top / "it.plan")


def _twice(top: Path) -> None:
    shutil.copytree(FIXTURES / "z1_dp2_sgdm", top / ONE)
    good("convert", top / ONE, top / "other", "--to", "zero1(dp=3)")


def _nothing(top: Path) -> None:
    """The tidied file is at its place."""


def _weights(top: Path) -> None:
    """A folder as Hugging Face has it."""
    (top / ONE).mkdir()
    save_file(
        {"model.embed_tokens.weight": torch.ones(4, 8), "model.norm.weight": torch.ones(8)},
        top / ONE / "model.safetensors",
    )


Z1, SGD = _source(FIXTURES / "z1_dp4"), _source(FIXTURES / "z1_dp2_sgdm")
INTO = ("{top}/" + ONE, "{top}/place/" + OUT)
ALONE = ("--workers", "1")
UNTIDY = (ROOT / "specs" / "plain.ucpl").read_text().replace(" = ", "  =  ", 3)

JOBS = (
    Job("convert", ("convert", *INTO, "--to", "zero1(dp=3)", *ALONE), Z1, resumes=True),
    Job("force", ("convert", *INTO, "--to", "zero3(dp=1)", "--force", *ALONE), SGD, resumes=True, old="folder"),
    Job("plain", ("convert", INTO[0], INTO[1] + ".pt", "--to", "plain()", *ALONE), SGD, OUT + ".pt", resumes=True),
    Job("anew", ("convert", *INTO, "--to", "zero1(dp=3, bf16=1)", *ALONE), _trainer, resumes=True),
    Job("apply", ("apply", "{top}/it.plan", *INTO, *ALONE), _planned, resumes=True),
    Job("plan", ("plan", "--from", INTO[0], "--to", "zero1(dp=3)", "-o", INTO[1]), SGD, old="old"),
    Job("infer", ("infer", INTO[0], "-o", INTO[1]), SGD),
    Job("import", ("import", "hf", INTO[0], "-o", INTO[1]), _weights, old="old"),
    Job("fmt", ("fmt", "{top}/place/x.ucpl"), _nothing, "x.ucpl", old=UNTIDY),
    Job("verify", ("verify", "{top}/other", *ALONE), _twice, ""),
    Job("compare", ("compare", INTO[0], "{top}/other", *ALONE), _twice, ""),
    Job("inspect", ("inspect", INTO[0], "--tensors"), _trainer, ""),
)
