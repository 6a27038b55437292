"""A small share of `make scale`, counted.

The work of each verb grows linearly with the checkpoint.

Lines of the product that are run, files that are open, bytes that are held: never seconds.
"""

import contextlib
import io
import os
import resource
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

import ucpl as package
from benchmarks.sparse import MAKERS, tensors_like
from ucpl.cli import main

HOUSE = str(Path(package.__file__).parent)
KINDS = tuple(MAKERS)
Line = tuple[str, int]
TARGETS = {"huggingface": "plain()", "plain": "safetensors()", "zero1": "zero3(dp=3)", "zero3": "zero1(dp=3)"}
SIZES = (25, 50, 100)  # tensors: the second step is twice the first, and so is the growth of linear work
GROWTH_MAX = 2.7  # quadratic work adds four times as much
LEAST = 2000  # times that a line is run more, below which it is not looked at: a start beyond some number is no growth


def made(top: Path, kind: str, count: int, files: int = 3, shape: tuple[int, ...] = (2, 2)) -> Path:
    path = top / f"{kind}-{count}-{files}"
    MAKERS[kind](path, tensors_like(count, shape), files)
    return path


def verbs(source: Path, kind: str) -> Iterator[list[str]]:
    """Every verb that reads a checkpoint, over this one."""
    target = source.with_name(source.name + (".out.pt" if kind == "huggingface" else ".out"))
    yield ["inspect", str(source)]
    yield ["infer", str(source)]
    yield ["show", str(source)]
    yield ["plan", "--from", str(source), "--to", TARGETS[kind]]
    yield ["convert", str(source), str(target), "--to", TARGETS[kind]]
    yield ["compare", str(source), str(target)]
    yield ["verify", str(target)]


def writing(source: Path, kind: str) -> list[list[str]]:
    return list(verbs(source, kind))[-3:]


def run(arguments: list[str]) -> None:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(arguments)
    assert status == 0, out.getvalue()


def lines_run(work: Callable[[], None]) -> Counter[tuple[str, int]]:
    """The number of runs of each line of the product.

    A comprehension's each time round.
    """
    files: dict[str, dict[int, int]] = {}
    tracers: dict[str, Callable | None] = {}

    def tracer(file: str) -> Callable | None:
        """It is called for each line.

        It shares its file's entry.
        """
        if not file.startswith(HOUSE):
            return None
        lines = files[file] = defaultdict(int)

        def line(frame, event, argument):
            if event == "line":
                lines[frame.f_lineno] += 1
            return line

        return line

    def call(frame, event, argument):
        file = frame.f_code.co_filename
        try:
            return tracers[file]
        except KeyError:
            return tracers.setdefault(file, tracer(file))

    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(None)
    return Counter({(file, line): count for file, lines in files.items() for line, count in lines.items()})


@pytest.mark.parametrize("kind", ["huggingface", "zero1"])
def test_no_line_is_run_more_often_than_there_are_tensors_more(tmp_path, kind):
    """Converting infers, locates, plans and writes."""
    found = []
    for count in SIZES:
        source = made(tmp_path, kind, count)
        if count == SIZES[0]:
            for arguments in verbs(made(tmp_path, kind, 4), kind):  # imports and caches are no cost of a tensor
                run(arguments)
        found.append([lines_run(partial(run, arguments)) for arguments in writing(source, kind)])
    for number, arguments in enumerate(writing(Path("it"), kind)):
        steep = steep_of(*(each[number] for each in found))
        assert not steep, (arguments, steep)


def steep_of(few: Counter[Line], more: Counter[Line], many: Counter[Line]) -> dict[Line, tuple[int, int, int]]:
    return {
        line: (few[line], more[line], many[line])
        for line in many
        if many[line] - more[line] > max(LEAST, GROWTH_MAX * (more[line] - few[line]))
    }


def test_verify_of_weights_next_to_their_masters_grows_as_they_do(tmp_path):
    """Each is held against the other, tensor by tensor."""
    found = []
    for count in (4, *SIZES):  # the first time is for imports
        target = tmp_path / f"target-{count}"
        run(["convert", str(made(tmp_path, "huggingface", count)), str(target), "--to", "zero1(dp=2)"])
        found.append(lines_run(partial(run, ["verify", str(target)])))
    assert not (steep := steep_of(*found[1:])), steep


@contextlib.contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """As `ulimit -n` that is nearly reached.

    So many more files may be open.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    unused = (number for number in range(before[0]) if number not in taken)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next(islice(unused, free, None)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "plain"])  # which is one file
def test_more_files_than_descriptors(tmp_path, kind):
    """None is kept open without a bound, and none is left open."""
    count = 100
    source = made(tmp_path, kind, count if kind == "huggingface" else 2, count, (count, 2))
    for arguments in verbs(made(tmp_path, kind, 4), kind):
        run(arguments)
    with few_descriptors(370), contextlib.ExitStack() as others:  # a job may be near its limit of open files
        for _ in range(300):
            others.callback(os.close, os.dup(0))
        before = set(os.listdir("/proc/self/fd"))
        for arguments in verbs(source, kind):
            run(arguments)
        assert len(os.listdir("/proc/self/fd")) <= len(before)


def held_by(arguments: list[str]) -> int:
    """Bytes that are held at most at one time."""
    tracemalloc.start()
    try:
        run(arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_the_size_of_a_tensor_costs_no_memory(tmp_path, kind):
    """2^33 elements take as much work as 2^16.

    They are read, planned and shown.
    """
    for verb in range(4):
        peaks: list[int] = []
        for rows in (1, 1, 1 << 17):  # the first time is for imports
            top = tmp_path / f"{verb}-{len(peaks)}"
            top.mkdir()
            source = made(top, kind, 1, 1, (rows, 1 << 16))
            peaks.append(held_by(list(verbs(source, kind))[verb]))
        assert peaks[2] < 1.2 * peaks[1] + (1 << 18), (kind, verb, peaks)


@pytest.mark.parametrize("kind", ["zero1", "huggingface"])
def test_memory_grows_with_files_no_faster_than_they_do(tmp_path, kind):
    sources = [made(tmp_path, kind, 60 if kind == "huggingface" else 5, files, (240, 2)) for files in (15, 30, 60)]
    for arguments in writing(made(tmp_path, kind, 4), kind):
        run(arguments)
    for few, more, many in zip(*(map(held_by, writing(source, kind)) for source in sources), strict=True):
        assert many - more <= GROWTH_MAX * (more - few) + (1 << 18), (few, more, many)
