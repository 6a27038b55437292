"""Counted work behind the figures of docs/PERFORMANCE.md.

Nodes, opened files, bytes, allocations, modules. Other work of the machine changes none of them. Seconds are in `make bench`.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

import ucpl
from benchmarks.sparse import MAKERS, tensors_like, unlike
from tests.cli.command import FIXTURES, ROOT
from tests.counted import calls
from ucpl.cli.run import run
from ucpl.conversion.planning import Asked
from ucpl.conversion.requests import Given
from ucpl.conversion.share import share_of
from ucpl.formats.opening import open_checkpoint
from ucpl.planning import Plan
from ucpl.planning.files import plan_bytes
from ucpl.runtime import Report

PER_TENSOR = 2_700  # bytes of memory at most, of one tensor more in a plan without a spec
PEAK = 8 << 20  # bytes of memory, of a plan of 2,300 tensors
CALLS = 125  # at most, for one tensor more that folds
APART = 290  # at most, for one tensor more of a size of its own
CONVERTED = {"plain()": 740}  # at most, for one tensor more that folds, in a conversion to this target
OF_RANK = 25  # at most, for a tensor in one more rank's files of ZeRO-3
KEPT = 4_950  # bytes of memory at most, of one tensor more in a conversion to plain()
OPENED = 215  # at most, to open a torch file with one tensor more
NAMED = 750  # bytes at most that one more tensor adds to the file of such a plan: its names and places
MODULES = 326  # of ucpl, in a process of `convert`
READS = 600  # calls of a conversion that reads 67 MB and writes 34, in tiles of 1 MiB
OTHERS = 390  # of Python and of packages, 30 of them of networkx


def experts(layers: int) -> dict[str, tuple[int, ...]]:
    """A model of experts, with names of DeepSeek-V3.

    A layer has 388 tensors.
    """
    made: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (512, 64)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        made |= {f"{at}.self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"}
        for n in range(128):
            made |= {f"{at}.mlp.experts.{n}.{side}_proj.weight": (32, 64) for side in ("gate", "up")}
            made[f"{at}.mlp.experts.{n}.down_proj.weight"] = (64, 32)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of 6 and 12 layers, of 8 files each."""
    top = tmp_path_factory.mktemp("experts")
    for layers in (6, 12):
        MAKERS["huggingface"](top / str(layers), experts(layers), 8)
    return [top / "6", top / "12"]


def work() -> dict[str, int]:
    """Bytes and calls of this process, as the kernel counts them."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(count) for name, count in (line.split(": ") for line in lines)}


def counted(do: Callable[[], object]) -> dict[str, int]:
    before = work()
    do()
    return {name: count - before[name] for name, count in work().items()}


_OPENED: list[str] | None = None


def _seen(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _OPENED is not None:
        _OPENED.append(str(arguments[0]))


sys.addaudithook(_seen)  # it stays, and does nothing outside of `opened`


def opened(do: Callable[[], object], top: Path) -> Counter[str]:
    """The number of times that each file of a folder is opened."""
    global _OPENED
    _OPENED = []
    try:
        do()
        return Counter(Path(name).name for name in _OPENED if name.startswith(str(top)))
    finally:
        _OPENED = None


@pytest.mark.parametrize("to", ["dcp(fsdp=8)", "zero3(dp=8)"])
def test_a_plan_without_a_spec_is_by_structure(folders: list[Path], to: str) -> None:
    """Twice the layers are as many nodes, and few bytes more."""
    plans: list[Plan] = [ucpl.plan(str(folder), to) for folder in folders]
    assert len(plans[0].nodes) == len(plans[1].nodes) < 60
    peaks = []
    for folder in folders:
        tracemalloc.start()
        ucpl.plan(str(folder), to)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    more = len(experts(12)) - len(experts(6))
    assert peaks[0] <= PEAK, peaks
    assert peaks[1] - peaks[0] <= PER_TENSOR * more, (peaks, more)
    sizes = [len(plan_bytes(plan)) for plan in plans]
    assert sizes[1] - sizes[0] <= NAMED * more, (sizes, more)


def calls_of_plan(folder: Path) -> int:
    ucpl.plan(str(folder), "dcp(fsdp=8)")  # imports, and texts that are kept
    return calls(lambda: ucpl.plan(str(folder), "dcp(fsdp=8)"))


def test_one_more_tensor_in_a_plan_takes_few_calls(folders: list[Path], tmp_path: Path) -> None:
    """Of those that fold, and of those that do not."""
    few, many = map(calls_of_plan, folders)
    more = len(experts(12)) - len(experts(6))
    assert many - few <= CALLS * more, (few, many, more)
    for count in (2_100, 2_300):
        MAKERS["huggingface"](tmp_path / str(count), unlike(count), 8)
    few, many = (calls_of_plan(tmp_path / str(count)) for count in (2_100, 2_300))
    assert many - few <= APART * 200, (few, many)


def test_one_more_tensor_in_a_torch_file_takes_few_calls(tmp_path: Path) -> None:
    counts = []
    for n in (500, 1000):
        path = tmp_path / f"{n}.pt"
        MAKERS["plain"](path, tensors_like(n, (2, 2)), 1)
        open_checkpoint(path)  # imports
        counts.append(calls(lambda path=path: open_checkpoint(path)))  # type: ignore[misc]
    assert counts[1] - counts[0] <= OPENED * 500, counts


@pytest.mark.parametrize("to", CONVERTED)
def test_one_more_tensor_in_a_conversion_takes_few_calls(tmp_path: Path, to: str) -> None:
    """Of planning, all heads, moves, digests, the read-back and the opened target."""
    counts: list[int] = []
    peaks: list[int] = []
    target = tmp_path / ("out.pt" if to == "plain()" else "out")

    def convert(n: int) -> None:
        ucpl.convert(tmp_path / str(n), target, to=to, force=True)

    for n in (2_500, 3_000):
        MAKERS["huggingface"](tmp_path / str(n), tensors_like(n, (2, 2)), 8)
        if not counts:
            convert(n)  # imports, and texts that are kept
        counts.append(calls(lambda n=n: convert(n)))  # type: ignore[misc]
        tracemalloc.start()
        convert(n)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert counts[1] - counts[0] <= CONVERTED[to] * 500, counts
    assert peaks[1] - peaks[0] <= KEPT * 500, peaks


def test_ranks_with_equal_pickles_are_read_once(tmp_path: Path) -> None:
    """One more rank is two files, and few calls for each tensor."""
    counts: list[int] = []
    for ranks in (10, 30):
        MAKERS["zero3"](tmp_path / str(ranks), tensors_like(300, (ranks, 2)), ranks)
        open_checkpoint(tmp_path / str(ranks))  # imports
        counts.append(calls(lambda ranks=ranks: open_checkpoint(tmp_path / str(ranks))))  # type: ignore[misc]
    assert counts[1] - counts[0] <= OF_RANK * 20 * 300, counts


def test_one_more_tensor_in_a_share_takes_as_few_calls(folders: list[Path]) -> None:
    """A rank's share is planned by families, too."""

    def share(folder: Path) -> int:
        asked = Asked(str(folder), "dcp(fsdp=8)")
        assert share_of(asked, Given(), 3).plan.families
        return calls(lambda: share_of(asked, Given(), 3))

    few, many = map(share, folders)
    more = len(experts(12)) - len(experts(6))
    assert many - few <= CALLS * more, (few, many, more)


def test_a_plan_reads_each_header_once(folders: list[Path]) -> None:
    """The bytes are those of headers, the index and the spec."""
    folder = folders[1]
    headers = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as data:
            headers += 8 + int.from_bytes(data.read(8), "little")
    index = sum(file.stat().st_size for file in folder.glob("*.json"))

    def plan() -> object:
        return ucpl.plan(str(folder), "dcp(fsdp=8)")

    plan()  # imports, and texts that are kept
    found = opened(plan, folder)
    assert found and max(found[file.name] for file in folder.glob("*.safetensors")) <= 2, found
    done = counted(plan)
    assert done["rchar"] <= 2.1 * headers + 3 * index + (1 << 19), (done, headers, index)
    assert done["wchar"] <= 1 << 16


def test_a_conversion_moves_each_byte_once(tmp_path: Path) -> None:
    """The read-back reads the target once more, and nothing else."""
    source = tmp_path / "source.pt"
    ucpl.convert(FIXTURES / "z1_dp4", tmp_path / "warm", to="zero1(dp=3)")
    shapes = {f"blocks.{n}.weight": (1024, 512) for n in range(8)}
    MAKERS["plain"](source, shapes, 1)
    reports: list[Report] = []
    done = counted(lambda: reports.append(ucpl.convert(source, tmp_path / "target", to="zero1(dp=3)").report))
    size = sum(file.stat().st_size for file in (tmp_path / "target").rglob("*") if file.is_file())
    read = reports[0].bytes_needed  # weights, and masters of them
    assert done["wchar"] <= 1.02 * size + (1 << 18), (done, size)
    assert done["rchar"] <= 1.02 * (read + size) + (1 << 20), (done, read, size)
    assert done["syscr"] + done["syscw"] <= READS, done


def test_a_conversion_imports_few_modules(tmp_path: Path) -> None:
    """Each costs a start some tenths of a millisecond."""
    code = (
        "import sys\nfrom ucpl.cli import main\nstatus = main()\n"
        "mine = sum(name.split('.')[0] == 'ucpl' for name in sys.modules)\n"
        "print(status, mine, len(sys.modules) - mine, file=sys.stderr)"
    )
    arguments = ("convert", str(FIXTURES / "z1_dp4"), str(tmp_path / "target"), "--to", "zero1(dp=3)")
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    status, mine, others = map(int, done.stderr.split()[-3:])
    assert not status and mine <= MODULES and others <= OTHERS, (mine, others)


def test_one_command_seldom_searches_old_objects_for_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan makes millions of objects, and verbs that serve search often."""
    found: dict[str, tuple[int, ...]] = {}
    for verb in ("formats", "lsp"):
        seen: list[tuple[int, ...]] = []
        monkeypatch.setattr(gc, "set_threshold", lambda *one, seen=seen: seen.append(one))
        run([verb, "--help"])
        found[verb] = seen[0]
    assert found["formats"][2] >= 1_000 and found["lsp"][2] <= 10, found
