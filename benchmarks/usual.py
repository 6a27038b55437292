"""Time the usual tools and ucpl on the same checkpoints.

Each round runs each tool once, then ucpl as it is by default (synced and read back from the disk), then without reading back.
The tools neither sync nor read back. `zero_to_fp32.py` writes `pytorch_model.bin`: its `--safe_serialization` refuses the tied
weights of this model.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import convert
from ucpl.records import frozen

__all__ = ["USUAL_HEAD", "bench_usual"]

USUAL_HEAD = (
    "wish", "usual tool", "its seconds", "its peak", "ucpl", "seconds", "peak", "ratio", "without read-back", "its ratio",
)  # fmt: skip


@frozen
class Wish:
    """A conversion that a usual tool does, too."""

    name: str
    tool: str  # as the page names it
    command: tuple[str, ...]  # arguments of python: {source}, {out}
    source: str  # the form of the source
    to: str
    file: str = ""  # the target is this file in the new folder


_DCP = ("-m", "torch.distributed.checkpoint.format_utils")
WISHES = (
    Wish(
        "ZeRO-1 → weights in fp32", "zero_to_fp32.py",
        ("-m", "deepspeed.utils.zero_to_fp32", "{source}", "{out}"), "zero1(dp=2)",
        "safetensors(dtype=f32)",
    ),
    Wish(
        "ZeRO-1 → universal", "ds_to_universal.py",
        ("-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state", "--input_folder", "{step}",
         "--output_folder", "{out}"), "zero1(dp=2)", "universal()",
    ),
    Wish("DCP → one torch file", "dcp_to_torch_save", (*_DCP, "dcp_to_torch", "{source}", "{out}"), "dcp(fsdp=2)",
         "torch_file()", "model.pt"),
    Wish("one torch file → DCP", "torch_save_to_dcp", (*_DCP, "torch_to_dcp", "{source}", "{out}"), "torch_file()",
         "dcp(fsdp=2)"),
)  # fmt: skip


def bench_usual(python: str, rounds: int, gib: float, folder: str | None) -> Iterator[tuple[str, ...]]:
    """Yield a row for each wish.

    python: one with DeepSpeed; gib: size of the ZeRO-1 checkpoint; folder: on the disk that is measured.
    """
    with tempfile.TemporaryDirectory(prefix="ucpl-bench-", dir=folder) as made:
        top = Path(made)
        sources = {"zero1(dp=2)": convert.checkpoint(python, top, gib)}
        for form, name in (("dcp(fsdp=2)", "dcp"), ("torch_file()", "model.pt")):
            convert.run(_ours(sources["zero1(dp=2)"], top / name, form), json_told=True)
            sources[form] = top / name
        for wish in WISHES:
            yield _row(wish, python, sources[wish.source], top / "out", rounds)


def _row(wish: Wish, python: str, source: Path, out: Path, rounds: int) -> tuple[str, ...]:
    target = out / wish.file if wish.file else out
    step = next((p for p in source.iterdir() if p.is_dir()), source) if source.is_dir() else source
    theirs = [python, *(part.format(source=source, out=target, step=step) for part in wish.command)]
    commands = {
        "theirs": theirs,
        "ours": _ours(source, target, wish.to),
        "unread": [*_ours(source, target, wish.to), "--read-back", "none"],
    }
    found: dict[str, list[convert.Run]] = {name: [] for name in commands}
    for i in range(rounds + 1):
        for name, command in commands.items():
            convert.warm(source)
            if wish.file and name == "theirs":
                out.mkdir()
            run = convert.run(command, json_told=name != "theirs")
            if i:  # the first round fills the caches
                found[name].append(run)
            convert.remove(out)
    peer, ours, unread = (statistics.median(run.wall for run in runs) for runs in found.values())
    peaks = [f"{max(run.mib for run in runs):.0f} MiB" for runs in found.values()]
    return (
        wish.name, f"`{wish.tool}`", f"{peer:.1f}", peaks[0], f"`--to '{wish.to}'`", f"{ours:.1f}", peaks[1],
        f"{peer / ours:.1f}", f"{unread:.1f}", f"{peer / unread:.1f}",
    )  # fmt: skip


def _ours(source: Path, out: Path, to: str) -> list[str]:
    return [sys.executable, "-m", "ucpl", "convert", str(source), str(out), "--to", to, "--json"]
