"""Compare DeepSpeed's converter with ours on every DeepSpeed checkpoint of this repository.

Both make a universal folder, which is compared with `plain()` of the same checkpoint; tests compare that with the state
that was
gathered from the running engines. Read here with torch alone: a file for each state of each parameter, under the
parameter's name.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

from benchmarks.children import finished

ROOT = Path(__file__).resolve().parents[1]
FIXTURES, EXAMPLE = ROOT / "tests" / "fixtures" / "deepspeed", ROOT / "examples" / "checkpoint"
LLAMA = "megatron_deepspeed.ucpl:llama()"
SPECS = dict.fromkeys(("tp2_pp2_dp1_z1", "tp2_ep2_dp2_z1"), LLAMA)  # for folders that do not record their cuts
CALLERS = ("argparse.Namespace", "numpy._core.multiarray._reconstruct", "numpy.dtype", "numpy.ndarray")
SECONDS = 120  # of one conversion

# Equal, other, lacking: states of trained parameters in a universal folder, against those of plain().
HELD = """
import json, sys
from pathlib import Path
import torch
plain, folder = map(Path, sys.argv[1:])
params = torch.load(plain, weights_only=False)["params"]
found = {"equal": 0, "other": 0, "lacking": 0}
for name, states in params.items():
    if "fp32" not in states:
        continue
    for state, value in states.items():
        file = folder / "zero" / name / f"{state}.pt"
        if state == "weight" or not torch.is_tensor(value) or not value.ndim:
            continue
        if not file.exists():
            found["lacking"] += 1
            continue
        made = torch.load(file, weights_only=False)
        made = made["param"] if isinstance(made, dict) else made
        if made.ndim == 2 and made.shape[0] < value.shape[0] and "word_embeddings" in name:
            value, rows = value[:len(made)], len(value) - len(made)
            found["without padding"] = max(found.get("without padding", 0), rows)
        same = made.numel() == value.numel() and torch.equal(made.flatten(), value.flatten())
        same = same and (made.ndim < 2 or made.shape == value.shape)
        found["equal" if same else "other"] += 1
print(json.dumps(found))
"""


@frozen
class Made:
    """A converter's exit, the content of its folder, and its cost."""

    failed: str  # the last line of its output; empty: it ended well
    found: dict[str, int]
    core: float  # seconds
    mib: float  # at most resident

    def __str__(self) -> str:
        return self.failed or told(self.found)

    @property
    def cost(self) -> str:
        return f"{self.core:.1f} s, {self.mib:.0f} MiB"


def told(found: dict[str, int]) -> str:
    rows = found.pop("without padding", 0)
    other = [f"{n} {what}" for what, n in found.items() if n and what != "equal"]
    more = f", without {rows} rows of padding" if rows else ""
    return (f"{found['equal']} equal, {', '.join(other)}" if other else f"all {found['equal']} equal") + more


def bench_peer(python: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each checkpoint: each converter's target and its cost.

    python: one with DeepSpeed.
    """
    for source in sorted(path.parent for path in (*FIXTURES.glob("*/latest"), *EXAMPLE.glob("latest"))):
        with tempfile.TemporaryDirectory(prefix="ucpl-bench-") as folder:
            top = Path(folder)
            plain, ours, theirs = (top / name for name in ("plain", "ours", "theirs"))
            truth = _run(_ucpl(source, plain, "plain()"))
            if truth.failed:
                raise SystemExit(f"{source}: plain() {truth.failed}")
            mine = _run(_ucpl(source, ours, "universal()"))
            step = source / (source / "latest").read_text().strip()
            peer = [python, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
            peer += ["--input_folder", str(step), "--output_folder", str(theirs / f"{step.name}_universal")]
            done = _run([*peer, "--num_extract_workers", "1", "--num_merge_workers", "1"])
            mine, done = (_held(python, made, plain, at) for made, at in ((mine, ours), (done, theirs)))
            yield source.name, str(mine), str(done), mine.cost, done.cost


def _ucpl(source: Path, target: Path, to: str) -> list[str]:
    command = [sys.executable, "-m", "ucpl", "convert", str(source), str(target), "--to", to]
    if source.name in SPECS:
        command += ["--from", SPECS[source.name]]
    return [*command, *(part for name in CALLERS for part in ("--allow-global", name))]


def _run(command: list[str]) -> Made:
    """Run a command in a process of its own, with its children."""
    probe = (
        "import json, resource, subprocess, sys\n"
        f"done = subprocess.run({command!r}, capture_output=True, text=True, timeout={SECONDS})\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(json.dumps([done.returncode, done.stdout[-4000:], done.stderr[-4000:],"
        " used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]))"
    )
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    status, out, error, core, mib = json.loads(finished([sys.executable, "-c", probe], environment))
    lines = [line.strip() for line in (out + error).splitlines() if line.strip()]
    said = next((f"refused, {line[6:10]}" for line in lines if line.startswith("error[")), "")
    last = (lines[-1] if lines else f"exit status {status}")[:80].replace("|", "/")
    return Made((said or f"fails: {last}") if status else "", {}, core, mib)


def _held(python: str, made: Made, plain: Path, target: Path) -> Made:
    if made.failed:
        return made
    folder = next(path for path in target.glob("*_universal") if path.is_dir())
    file = plain / "plain.pt" if plain.is_dir() else plain
    told = finished([python, "-c", HELD, str(file), str(folder)], {**os.environ, "DS_ACCELERATOR": "cpu"})
    return Made("", json.loads(told.splitlines()[-1]), made.core, made.mib)
