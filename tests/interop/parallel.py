"""Sources trained, targets converted and loaded, for tests of pipelines and experts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from attrs import field, frozen

import ucpl
from tests.interop import processes

ROOT = Path(__file__).parents[2]
STEPS = 3
HOME = "HOME:"  # before the call of a layout that `ucpl infer` writes of the source
PEER = "ds_to_universal"  # DeepSpeed's own converter, on the way to a target
OLDER = "before 0.19.4"  # the same files in the form of older releases with experts, on the way to a target
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}  # of the losses after a restart at other degrees


PARALLEL = Path(__file__).with_name("parallel_job.py")
SECONDS = 1500  # of all jobs of a script, on a machine that does other things


@frozen
class Source:
    world: int
    run: dict[str, Any]


@frozen
class Target:
    """A target of a source.

    The call of its layout, and its run.
    """

    source: str
    world: int
    call: str
    run: dict[str, Any]  # differences from the source's
    via: tuple[str, ...] = field(default=())  # layouts on the way; or PEER, or OLDER
    spoiled: bool = False  # one moment is changed after the conversion: the check must fail
    loaded: str = ""  # the loader, if several load one folder

    def __str__(self) -> str:
        more = ("spoiled",) * self.spoiled + (self.loaded,) * bool(self.loaded)
        words = "-".join((self.source, *self.via, self.call, *more))
        return re.sub("[^a-z0-9-]+", "_", words).rstrip("_")


def launch(name: str, jobs: list[dict[str, Any]], script: Path) -> None:
    """Have a script do all jobs, each on its `world` of ranks.

    name: of its list and log.
    """
    if not jobs:
        return
    folder = Path(jobs[0]["result"]).parent
    listed = folder / f"{name}.jobs.json"
    listed.write_text(json.dumps(jobs))
    # Megatron would compile a handful of small functions, on each rank of each job: minutes of a core for nothing.
    unlike = {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1", "TORCH_COMPILE_DISABLE": "1"}
    with (folder / f"{name}.log").open("w") as out:
        try:
            command = [sys.executable, str(script), str(listed)]
            processes.run(command, SECONDS, env={**os.environ, **unlike}, cwd=folder, stdout=out, stderr=out)
        except subprocess.TimeoutExpired:
            out.write(f"no end after {SECONDS} seconds")


def convert(source: Path, target: Path, call: str) -> str:
    """Convert, and return an error text or ""."""
    names = source.with_suffix(".names.json")
    try:
        ucpl.convert(source, target, to=call, layout=f'zero0(order="{names}")' if names.exists() else None)
    except ucpl.UcplError as error:
        return f"{call}: {error}"
    return ""


def convert_by_peer(source: Path, target: Path) -> str:
    """Run DeepSpeed's own converter, and return an error text or ""."""
    step = source / (source / "latest").read_text()
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder", str(step)]
    command += ["--output_folder", str(target / f"{step.name}_universal"), "--num_extract_workers", "1"]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--num_merge_workers", "1", "--no_strict"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return "" if done.returncode == 0 else f"{PEER}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


def home(source: str, folder: Path) -> str:
    """The text of `ucpl infer` for a source, as a layout.

    It has the source's stages and cuts by name.
    """
    text = folder / f"{source}.ucpl"
    command = [sys.executable, "-m", "ucpl", "infer", str(folder / source), "-o", str(text)]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True, timeout=300)
    return f"{text}:"


def convert_all(target: Target, folder: Path) -> str:
    here = folder / target.source
    for n, call in enumerate((*target.via, target.call)):
        there = folder / f"{target}.{n}"
        if call.startswith(HOME):
            call = home(target.source, folder) + call.removeprefix(HOME)
        if call == OLDER:
            from tests.formats.deepspeed.test_deepspeed_moe import older

            here = older(here, there)
            continue
        if error := convert_by_peer(here, there) if call == PEER else convert(here, there, call):
            return error
        here = there
    if target.spoiled:
        spoil(here)
    here.rename(folder / str(target))
    return ""


def spoil(folder: Path) -> None:
    """Change one element of one moment, by torch."""
    import torch

    if (folder / "latest_universal").exists():
        atom = folder / (folder / "latest_universal").read_text() / "zero" / "2.attention.out.weight" / "exp_avg.pt"
        value = torch.load(atom, weights_only=False)
        value["param"][0, 1] += 0.25
        torch.save(value, atom)
        return
    change_moment(folder)


def spoil_chunk(folder: Path, key: str) -> None:
    """Change one element of a chunk, at its place in torch's `.metadata`."""
    import io

    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    placed = FileSystemReader(folder).read_metadata().storage_data
    place = next(place for index, place in placed.items() if index.fqn == key)
    file = folder / place.relative_path
    held = bytearray(file.read_bytes())
    archive = bytes(held[place.offset : place.offset + place.length])
    tensor = torch.load(io.BytesIO(archive), weights_only=True)
    at = archive.index(tensor.contiguous().numpy().tobytes())
    tensor[(0,) * tensor.ndim] += 0.25
    new = tensor.contiguous().numpy().tobytes()
    held[place.offset + at : place.offset + at + len(new)] = new
    file.write_bytes(held)


def change_moment(
    folder: Path, shards: str = "zero_pp_rank_0_mp_rank_00", section: str = "base_optimizer_state"
) -> None:
    """Change one element of the first moment of these shards, by torch."""
    import torch

    for file in (folder / (folder / "latest").read_text()).glob(f"{shards}_optim_states.pt"):
        value = torch.load(file, weights_only=False)
        value["optimizer_state_dict"][section]["state"][0]["exp_avg"][1] += 0.25
        torch.save(value, file)


def work(sources: dict[str, Source], targets: tuple[Target, ...], folder: Path, script: Path = PARALLEL) -> Path:
    """Do all jobs; results are in NAME.json."""
    jobs: list[dict[str, Any]] = []
    for name, source in sources.items():
        job = {"do": "train", "world": source.world, "run": source.run, "steps": STEPS, "folder": str(folder / name)}
        jobs.append({**job, "truth": str(folder / f"{name}.truth"), "result": str(folder / f"{name}.json")})
    launch("train", jobs, script)
    jobs = []
    for target in targets:
        result_file = folder / f"{target}.json"
        if error := convert_all(target, folder):
            result_file.write_text(json.dumps({"error": error}))
            continue
        run = {**sources[target.source].run, **target.run}
        job = {"do": "load", "world": target.world, "run": run, "steps": STEPS, "folder": str(folder / str(target))}
        jobs.append({**job, "truth": str(folder / f"{target.source}.truth"), "result": str(result_file)})
    launch("load", jobs, script)
    return folder


def result(folder: Path, name: str) -> dict[str, Any]:
    file = folder / f"{name}.json"
    if not file.exists():
        logs = "\n".join(log.read_text()[-3000:] for log in folder.glob("*.log"))
        pytest.fail(f"{name} was not reached:\n{logs}")
    found: dict[str, Any] = json.loads(file.read_text())
    if "error" in found:
        pytest.fail(found["error"])
    return found


def check(target: Target, sources: dict[str, Source], folder: Path) -> None:
    """Check for a bit-equal state, and losses of an uninterrupted run.

    At its own degrees, losses are bit-equal, too.
    """
    source, found = result(folder, target.source), result(folder, str(target))
    assert found["differences"] == []
    known = sources[target.source]
    if target.world == known.world and all(known.run.get(k) == v for k, v in target.run.items()):
        assert found["after"] == source["after"]
    else:
        tolerance = max(TOLERANCE[run["dtype"]] for run in (known.run, {**known.run, **target.run}))
        assert found["after"] == pytest.approx(source["after"], rel=0, abs=tolerance)


def check_spoiled(target: Target, sources: dict[str, Source], folder: Path) -> None:
    source, found = result(folder, target.source), result(folder, str(target))
    assert len(found["differences"]) == 1
    assert found["differences"][0].endswith("/exp_avg differs")
    tolerance = TOLERANCE[sources[target.source].run["dtype"]]
    assert found["after"] != pytest.approx(source["after"], rel=0, abs=tolerance)


def check_source(name: str, folder: Path) -> None:
    """Check that reference losses change, and that all ranks agree."""
    found = result(folder, name)
    assert len({*found["before"], *found["after"]}) == STEPS + 2
    assert found["apart"] == []


def whole(targets: Iterable[Target]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("target", [t for t in targets if not t.spoiled], ids=str)


def spoiled(targets: Iterable[Target]) -> pytest.MarkDecorator:
    """Targets with one moment changed on purpose, which must be found."""
    return pytest.mark.parametrize("target", [t for t in targets if t.spoiled], ids=str)
