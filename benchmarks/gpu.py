"""Checks and timings of tensors on a GPU: `reshard`, `load_into`, vaults.

The checks compare with torch's own slicing, the timings with DCP.

    python -m pip install --target /tmp/site --no-deps attrs lark networkx platformdirs safetensors xxhash
    PYTHONPATH=/tmp/site:. python3 -m benchmarks.gpu [--json FILE]

One GPU, torch with NumPy, and these are enough (2 ranks share the GPU by gloo).
The script ends within `--limit` seconds, prints each table
as soon as it is known and a line for each check that fails, and exits with 1 if one fails or has no time. Each table has a time
of its own too, and lists the measurements that did not fit. Without a GPU the script says so and exits with 0. `--cpu`
runs the same with tensors of the CPU and small sizes. The figures of the documentation come from

    python3 -m benchmarks.gpu --gib 4 --limit 190 --tables loads,training,phases,reshard,vault,saves
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.nn import functional as F

import ucpl
from ucpl.installed import entry_points
from ucpl.vault import Vault
from ucpl.vault.arenas import Arenas
from ucpl.vault.staging import Cuda
from ucpl.vault.writer import Writer

BEGIN = time.monotonic()

SHAPE = (4, 6, 2, 3)
RANKS = 2
LIMIT = 150  # seconds in all
# Of these, seconds for each table at most: where `--limit` is another, as many times more.
SECONDS = {
    "loads": 45, "training": 40, "phases": 40, "reshard": 30, "vault": 60, "saves": 65, "process": 60, "ranks": 60,
}  # fmt: skip
DTYPES = {
    "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "f8_e4m3fn": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2, "i8": torch.int8, "i64": torch.int64, "bool": torch.bool, "c64": torch.complex64,
}  # fmt: skip
SPEC = """ucpl 1
model m {{
  dim n = 4, k = 6, a = 2, b = 3
  w : n k a b dtype {dtype}
}}
layout rows(p) of m {{
  framework torch()
  mesh p
  file weights = torch "{{p}}.pt"
  w = n@p k a b as "w"
}}
layout columns(p) of m {{
  framework torch()
  mesh p
  file weights = torch "{{p}}.pt"
  w = n k@p a b as "w"
}}
"""
LARGE = """ucpl 1
model m {{
  dim n = {side}, k = {side}
  w : n k dtype f32
}}
layout rows(p) of m {{
  framework torch()
  mesh p
  file weights = torch "{{p}}.pt"
  w = n@p k as "w"
}}
layout columns(p) of m {{
  framework torch()
  mesh p
  file weights = torch "{{p}}.pt"
  w = n k@p as "w"
}}
layout turned(p) of m {{
  framework torch()
  mesh p
  file weights = torch "{{p}}.pt"
  w = k n@p as "w"
}}
"""
Check = tuple[str, Callable[[], None]]


# ---- Odd tensors -------------------------------------------------------------------------------------------------------------


def numbers(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values of the model's tensor, on the CPU."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))
    if dtype.is_complex:
        return torch.complex(values, values.flip(0))
    return (values * 8).to(dtype) if dtype != torch.bool else values > 0


def filled(view: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    view.copy_(values)
    return view


def views(values: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """The same numbers in several memory layouts.

    Keys that begin with `read` cannot be filled.
    """
    shape, dtype = tuple(values.shape), values.dtype

    def empty(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.uint8, device=device).to(dtype)

    here = values.to(device)
    found = {
        "contiguous": here.clone(),
        "gaps": filled(empty(*shape, 2)[..., 1], here),
        "every second row": filled(empty(2 * shape[0], *shape[1:])[::2], here),
        "transposed": filled(empty(*shape[::-1]).permute(3, 2, 1, 0), here),
        "part of a buffer": filled(empty(5 + values.numel())[5:].view(shape), here),
        "channels_last": here.contiguous(memory_format=torch.channels_last),
        "parameter": nn.Parameter(here.clone(), requires_grad=dtype.is_floating_point),
    }
    if dtype in (torch.float32, torch.bfloat16, torch.float16):
        found["negative view"] = torch._neg_view(-here)
    if dtype == torch.float32:
        found["imaginary part of a conjugate"] = torch.complex(here, -here).conj().imag
    if dtype.is_complex:
        found["conjugate"] = here.conj().resolve_conj().conj()
    return found


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if torch reads the same bits in both tensors."""
    where = one.device  # comparing there is a thousand times as fast as bringing it all to the CPU
    left, right = (
        t.detach().to(where).resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (one, other)
    )
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(left, right)


def demand(found: torch.Tensor, wanted: torch.Tensor, device: torch.device | None = None) -> None:
    assert same(found, wanted), f"other numbers: {found.flatten()[:4]} is not {wanted.flatten()[:4]}"
    assert device is None or found.device.type == device.type, f"it is on {found.device}"


class Late(BaseException):
    """The end of a table's time.

    No timed code catches it by mistake.
    """


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises: Late in the midst of the block, once they are over."""

    def late(*_: object) -> None:
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(0.01, seconds))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def outcomes(checks: Iterator[Check]) -> list[tuple[str, str]]:
    """(name, error) of each check; an empty error is a pass."""
    found = []
    for name, act in checks:
        try:
            act()
            found.append((name, ""))
        except Late:
            return [*found, (name, "no time was left for this and what follows")]
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            found.append((name, f"{type(error).__name__}: {str(error)[:300]} ({where.filename}:{where.lineno})"))
    return found


# ---- Two ranks ---------------------------------------------------------------------------------------------------------------


def rank_checks(rank: int, device: torch.device, folder: Path) -> Iterator[Check]:
    host = torch.device("cpu")

    def moved(name: str, given: torch.Tensor, full: torch.Tensor, out: torch.Tensor | None) -> None:
        more: Any = {} if out is None else {"out": {"w": out}}
        here, there = (f"{folder}/{name}.ucpl:{layout}(p={RANKS})" for layout in ("rows", "columns"))
        got = ucpl.reshard({"w": given}, here, there, **more)["w"]
        assert out is None or got is out
        demand(got, full.chunk(RANKS, 1)[rank], given.device if out is None else out.device)

    for name, dtype in DTYPES.items():
        full = numbers(dtype)
        mine, wanted = full.chunk(RANKS, 0)[rank], full.chunk(RANKS, 1)[rank]
        for how, given in views(mine, device).items():
            yield f"reshard {name}: {how}", partial(moved, name, given, full, None)
        blank = torch.zeros_like(wanted)
        for how, out in views(blank, device).items():
            if how not in ("conjugate", "imaginary part of a conjugate"):
                yield f"reshard {name}: out is {how}", partial(moved, name, mine.to(device), full, out)
        if device.type == "cuda":
            yield f"reshard {name}: pinned", partial(moved, name, mine.pin_memory(), full, None)
            yield f"reshard {name}: out is pinned", partial(moved, name, mine.to(device), full, blank.pin_memory())
        yield f"reshard {name}: out on the CPU", partial(moved, name, mine.to(device), full, torch.zeros_like(wanted))
        given = mine.to(device if rank else host)
        yield f"reshard {name}: rank 0 on the CPU", partial(moved, name, given, full, None)
    row = numbers(torch.float32)[:1].expand(SHAPE)
    given = row[:1].to(device).expand(SHAPE[0] // RANKS, *SHAPE[1:])
    yield "reshard f32: expanded", partial(moved, "f32", given, row, None)
    yield "StorageReader: shards on the device", partial(sharded, device, folder)


def sharded(device: torch.device, folder: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = DeviceMesh(device.type, list(range(RANKS)))
    state = {}
    for name, dtype in DTYPES.items():
        local = torch.zeros_like(numbers(dtype).chunk(RANKS, 1)[dist.get_rank()], device=device)
        state[f"model.{name}"] = DTensor.from_local(local, mesh, [Shard(1)], run_check=False)
    load(state, storage_reader=ucpl.StorageReader(folder / "odd"))
    for name, dtype in DTYPES.items():
        demand(state[f"model.{name}"].to_local(), numbers(dtype).chunk(RANKS, 1)[dist.get_rank()], device)


def ranks_main() -> None:
    """`python benchmarks/gpu.py --rank N DEVICE FOLDER`: a rank of the checks between ranks."""
    rank, device, folder = int(sys.argv[2]), torch.device(sys.argv[3]), Path(sys.argv[4])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = outcomes(rank_checks(rank, device, folder))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)


def prepared(folder: Path) -> None:
    """The input of the checks."""
    for name in DTYPES:
        (folder / f"{name}.ucpl").write_text(SPEC.format(dtype=name))
    save({"model": {name: numbers(dtype) for name, dtype in DTYPES.items()}}, checkpoint_id=folder / "odd")


def between_ranks(device: torch.device, folder: Path) -> list[tuple[str, str]]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(device), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    found: list[tuple[str, str]] = []
    for rank, one in enumerate(ranks):
        try:
            said = one.communicate()[1]
        except Late:
            for other in ranks:
                other.kill()
            said = "no end in time"
        answers = folder / f"rank-{rank}.json"
        some = json.loads(answers.read_text()) if answers.exists() else [("all of a rank", said[-600:])]
        found += [(f"rank {rank}: {name}", error) for name, error in some]
    return found


# ---- One process -------------------------------------------------------------------------------------------------------------


@contextmanager
def vault_at(home: Path, *more: str) -> Iterator[Vault]:
    """A vault of one rank, with its server."""
    command = [sys.executable, "-m", "ucpl", "vault", "serve", str(home), "--ranks", "1", "--domains", "1", *more]
    server = subprocess.Popen([*command, "--domain", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        if not server.stdout.readline().startswith("serving"):
            server.kill()
            raise RuntimeError(f"the server did not start: {server.communicate()[1][-600:]}")
        yield Vault.at(home)
    finally:
        server.terminate()
        server.communicate()


def counted(writer: Any, step: int) -> None:
    """Wait until the save is committed."""
    while (mine := writer.committed()) is None or mine[1] != step:
        time.sleep(0.002)
        if writer.error is not None:
            raise writer.error


def process_checks(device: torch.device, folder: Path) -> Iterator[Check]:
    host = torch.device("cpu")

    def model_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
        made = nn.Module()
        for name, tensor in tensors.items():
            made.register_buffer(name, tensor.detach())
        return made

    def loaded(path: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
        before = {name: tensor.data_ptr() for name, tensor in tensors.items()}
        ucpl.load_into(model_of(tensors), None, path)
        for name, tensor in tensors.items():
            assert tensor.data_ptr() == before[name]
            demand(tensor, wanted[name])

    truth = {name: numbers(dtype) for name, dtype in DTYPES.items()}
    kinds = sorted({how for dtype in DTYPES.values() for how in views(numbers(dtype), host)})
    for how in kinds:
        blank = {name: views(torch.zeros_like(t), device).get(how) for name, t in truth.items()}
        some = {name: t for name, t in blank.items() if t is not None}
        path = folder / f"into {how}".replace(" ", "-")
        save({"model": {name: truth[name] for name in some}}, checkpoint_id=path)
        yield f"load_into: {how}", partial(loaded, path, some, truth)
    if device.type == "cuda":
        pinned = {name: torch.zeros_like(t).pin_memory() for name, t in truth.items()}
        yield "load_into: pinned", partial(loaded, folder / "odd", pinned, truth)
    mixed = {name: torch.zeros_like(t, device=(host, device)[i % 2]) for i, (name, t) in enumerate(truth.items())}
    yield "load_into: some on the CPU, some on the device", partial(loaded, folder / "odd", mixed, truth)
    yield "load_into: model and optimizer on the device", partial(resumed, device, folder)
    if device.type == "cuda":
        for backend in ("nccl", "cpu:gloo,cuda:nccl"):
            yield f"reshard in a group of {backend}", partial(by_backend, backend, device, folder)


def vault_checks(device: torch.device, folder: Path) -> Iterator[Check]:
    with vault_at(folder / "vault") as vault, vault.writer(0) as writer:
        yield "vault: odd tensors there and back", partial(vault_odd, device, folder, writer)
        yield "vault: changed right after the save", partial(vault_changed, device, folder, writer)
        if device.type == "cuda":
            yield "vault: kernels still running, another stream", partial(vault_late, device, folder, writer)
        yield "vault: both slots, over and over", partial(vault_again, device, folder, writer)
    yield "vault: gradients alone, replayed", partial(vault_replayed, device, folder)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(device)
        model(x).square().mean().backward()
        optimizer.step()


def small(device: torch.device, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}


def demand_same(one: tuple[nn.Module, torch.optim.Optimizer], other: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    for a, b in zip(one[0].parameters(), other[0].parameters(), strict=True):
        demand(b, a)
        for key, value in one[1].state[a].items():
            demand(other[1].state[b][key], value)


def resumed(device: torch.device, folder: Path) -> None:
    one, other = small(device, 1), small(device, 2)
    trained(*one, device, 3)
    save(state_of(*one), checkpoint_id=folder / "run")
    ucpl.load_into(*other, folder / "run")
    demand_same(one, other)


def back(folder: Path, truth: Mapping[str, torch.Tensor], name: str, *, by_torch: bool = True) -> None:
    """Compare the vault's content, by our reader, and torch's reading of `persist`."""
    url, persisted = f"vault:{folder}/{name}", folder / f"persisted-{time.monotonic_ns()}"
    for how in (ucpl.StorageReader(url, model="{name}"), *([None] if by_torch else [])):
        found = {key: torch.zeros_like(value, device="cpu").contiguous() for key, value in truth.items()}
        if how is None:
            command = [sys.executable, "-m", "ucpl", "vault", "persist", f"{folder}/{name}", str(persisted)]
            subprocess.run(command, check=True, capture_output=True)
            load(found, checkpoint_id=persisted)
        else:
            load(found, storage_reader=how)
        for key, value in truth.items():
            demand(found[key], value)


def vault_odd(device: torch.device, folder: Path, writer: Any) -> None:
    state = {}
    for name, dtype in DTYPES.items():
        for i, (how, tensor) in enumerate(views(numbers(dtype, 1), device).items()):
            state[f"{name}_{i}_{how.replace(' ', '_')}"] = tensor.detach()
    state["expanded"] = numbers(torch.float32)[:1].to(device).expand(SHAPE)
    state["cpu"], state["empty"] = numbers(torch.bfloat16), torch.empty(0, 3, device=device)
    state["large"] = torch.arange(30 << 20, dtype=torch.int32, device=device)
    if device.type == "cuda":
        state["pinned"] = numbers(torch.float32).pin_memory()
    assert writer.save(1, state)
    counted(writer, 1)
    back(folder, {key: value.cpu() for key, value in state.items()}, "vault")


def vault_changed(device: torch.device, folder: Path, writer: Any) -> None:
    state = {f"w{i}": torch.full((5 << 20,), float(i), device=device) for i in range(5)}
    truth = {key: value.cpu().clone() for key, value in state.items()}
    assert writer.save(2, state)
    for value in state.values():
        value.fill_(-1)
    counted(writer, 2)
    back(folder, truth, "vault", by_torch=False)


def vault_late(device: torch.device, folder: Path, writer: Any) -> None:
    """Save the results of kernels that began before the save."""
    own = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    for step, stream in ((3, None), (4, own)):
        wide, state = torch.randn(8192, 8192, device=device), {"w": torch.zeros(16 << 20, device=device)}
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(20):
                wide = wide @ wide
            state["w"] += float(step)
            assert writer.save(step, state)
            state["w"].fill_(-1)
        torch.cuda.synchronize()
        counted(writer, step)
        back(folder, {"w": torch.full((16 << 20,), float(step))}, "vault", by_torch=step == 4)


def vault_again(device: torch.device, folder: Path, writer: Any) -> None:
    """Overwrite both slots with other sizes, CPU tensors, a cut file."""
    for step in range(5, 11):
        state = {f"w{i}": torch.full(((3 + step % 3 * i) << 20,), float(i + step), device=device) for i in range(4)}
        state["on the CPU"] = torch.full((1000,), float(step))
        state["transposed"] = torch.arange(6e6, device=device).view(2000, 3000).t() + step
        truth = {key: value.cpu().clone() for key, value in state.items()}
        if step == 9:  # of the slot that this save goes to
            slot = min((0, 1), key=lambda slot: writer.here.shard(0, slot).stat().st_mtime_ns)
            arena = writer.here.arena(0, slot)
            had = arena.stat().st_size
            os.truncate(arena, 0)
            os.truncate(arena, had)
        assert writer.save(step, state)
        for value in state.values():
            value.fill_(-1)
        counted(writer, step)
        back(folder, truth, "vault", by_torch=False)


def vault_replayed(device: torch.device, folder: Path) -> None:
    one, depths = small(device, 1), []
    with vault_at(folder / "replayed", "--replays", "3") as vault, vault.writer(0) as writer:
        for step in range(4):
            trained(*one, device, 1)
            saved = writer.save(step, one)
            assert saved, saved.error
            counted(writer, step)
            depths.append(saved.replays)
        other = small(device, 2)
        ucpl.load_into(*other, f"vault:{folder}/replayed")
        demand_same(one, other)
    assert any(depths), f"no gradients alone were kept: {depths}"


def by_backend(backend: str, device: torch.device, folder: Path) -> None:
    dist.init_process_group(backend, init_method=f"file://{folder}/store-{len(backend)}", rank=0, world_size=1)
    try:
        full = numbers(torch.bfloat16)
        here, there = (f"{folder}/bf16.ucpl:{layout}(p=1)" for layout in ("rows", "columns"))
        for given in (full, full.to(device)):
            demand(ucpl.reshard({"w": given}, here, there)["w"], full, given.device)
    finally:
        dist.destroy_process_group()


# ---- Timings -----------------------------------------------------------------------------------------------------------------


def timed(act: Callable[[], object], device: torch.device) -> float:
    wait(device)
    begin = time.perf_counter()
    act()
    wait(device)
    return time.perf_counter() - begin


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shown(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


class Measured:
    """Seconds of several ways, as many repeats as the time allows.

    The first of each warms up, and does not count.
    """

    def __init__(self, seconds: float) -> None:
        self.end, self.skipped = time.monotonic() + seconds, 0
        self.taken: dict[str, list[tuple[float, ...]]] = {}
        self._longest: dict[str, float] = {}

    def fits(self, seconds: float) -> bool:
        is_late = time.monotonic() + seconds > self.end
        self.skipped += is_late
        return not is_late

    def repeat(self, way: str, act: Callable[[], tuple[float, ...]]) -> None:
        longest = self._longest.get(way, 0.0)
        if self.fits(longest):
            begin = time.monotonic()
            taken = act()
            self.taken.setdefault(way, []).append(taken)
            self._longest[way] = max(longest, time.monotonic() - begin)

    def columns(self) -> Iterator[tuple[str, list[list[float]]]]:
        for way, taken in self.taken.items():
            name = way if len(taken) > 1 else f"{way} (first time alone)"
            yield name, [list(one) for one in zip(*(taken[1:] or taken), strict=True)]


@contextmanager
def alone(folder: Path) -> Iterator[dist.ProcessGroup]:
    """A group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store-{time.monotonic_ns()}", rank=0, world_size=1)
    try:
        yield dist.new_group(backend="gloo")
    finally:
        dist.destroy_process_group()


def cached(device: torch.device) -> dict[str, dict[str, Any]]:
    """async_save with page-locked memory that it keeps between saves, on a GPU."""
    if device.type == "cpu":
        return {}
    return {"DCP async_save, cached staging": {"async_stager": BlockingAsyncStager(cache_staged_state_dict=True)}}


def saves(found: Measured, device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """Ways to save a state.

    Seconds in which the job waits, and until it is durable.
    """
    state = {f"w{i}": torch.randn(size // 32 // 4, device=device) for i in range(32)}
    room = torch.empty(size // 32 // 4, pin_memory=device.type == "cuda")

    def alone_copied() -> tuple[float, float]:
        copied = timed(lambda: [room.copy_(t, non_blocking=True) for t in state.values()], device)
        return copied, copied

    def by_vault(writer: Any, step: int) -> tuple[float, float]:
        begin = time.perf_counter()
        stalled = timed(partial(writer.save, step, state), device)
        counted(writer, step)
        return stalled, time.perf_counter() - begin

    def by_dcp(group: dist.ProcessGroup, more: dict[str, Any]) -> tuple[float, float]:
        made: list[Any] = []
        begin = time.perf_counter()
        stalled = timed(
            lambda: made.append(async_save(state, checkpoint_id=folder / "dcp", process_group=group, **more)), device
        )
        made[0].result()
        return stalled, time.perf_counter() - begin

    def by_torch() -> tuple[float, float]:
        saved = timed(lambda: torch.save(state, folder / "state.pt"), device)
        return saved, saved

    def measure() -> None:
        with alone(folder) as group, vault_at(folder / "timed") as vault, vault.writer(0) as writer:
            for i in range(5):
                found.repeat("copy to page-locked memory alone", alone_copied)
                found.repeat("vault", partial(by_vault, writer, i))
                for way, more in cached(device).items() if i < 3 else ():
                    found.repeat(way, partial(by_dcp, group, more))
                if i < 2:
                    found.repeat("DCP async_save", partial(by_dcp, group, {}))
                    found.repeat("torch.save", by_torch)

    yield from until_late(measure, found)
    for way, (stalls, alls) in found.columns():
        yield way, shown(stalls), shown(alls)
    for one in ("timed", "dcp"):
        shutil.rmtree(folder / one, ignore_errors=True)
    (folder / "state.pt").unlink(missing_ok=True)


def until_late(measure: Callable[[], None], found: Measured) -> Iterator[tuple[str, ...]]:
    """Measure, and report the ways that had no time."""
    try:
        with within(found.end + 3 - time.monotonic()):
            measure()
    except Late:
        found.skipped += 1
    if found.skipped:
        yield (f"({found.skipped} measurements did not fit in the time)",)


def loads(found: Measured, device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """Ways to load cached weight files into a model.

    Seconds, and GB a second.
    """
    from safetensors.torch import load_file, save_file

    side = int((size / 32 / 2) ** 0.5) // 8 * 8
    with device:
        model = nn.ModuleList(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(32))
    state = model.state_dict()
    truth = {name: value.clone() for name, value in state.items()}
    file = folder / "model.safetensors"
    ways: dict[str, Callable[[], object]] = {
        "safetensors load_file to the device, load_state_dict": lambda: model.load_state_dict(
            load_file(file, device=str(device))
        ),
        "load_into, the safetensors file": lambda: ucpl.load_into(model, None, file),
        "DCP load": lambda: load({"model": state}, checkpoint_id=folder / "weights"),
        "load_into, the DCP folder": lambda: ucpl.load_into(model, None, folder / "weights"),
        "load_into, the DCP folder, as a StorageReader of dcp.load": lambda: load(
            {f"model.{name}": value for name, value in state.items()},
            storage_reader=ucpl.StorageReader(folder / "weights"),
        ),
    }

    def checked(way: str, act: Callable[[], object]) -> tuple[float]:
        for value in state.values():
            value.zero_()
        taken = timed(act, device)
        for name, value in model.state_dict().items():
            assert same(value, truth[name]), f"{way}: {name} has other numbers"
        return (taken,)

    def measure() -> None:
        save_file({name: value.cpu() for name, value in state.items()}, file)
        save({"model": state}, checkpoint_id=folder / "weights")
        for _ in range(3):
            for way, act in ways.items():
                found.repeat(way, partial(checked, way, act))

    yield from until_late(measure, found)
    total = sum(value.nbytes for value in truth.values())
    for way, (seconds,) in found.columns():
        yield way, shown(seconds), f"{total / statistics.median(seconds) / 1e9:.2f} GB/s"
    file.unlink(missing_ok=True)
    shutil.rmtree(folder / "weights", ignore_errors=True)


def reshards(found: Measured, device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """Ways to bring a tensor into another layout, by one rank."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    side, spec = int((size / 4) ** 0.5) // 64 * 64, folder / "large.ucpl"
    spec.write_text(LARGE.format(side=side))
    given = torch.randn(side, side, device=device)
    out = torch.empty_like(given)
    backend = "nccl" if device.type == "cuda" else "gloo"

    def resharded(there: str) -> None:
        ucpl.reshard({"w": given}, f"{spec}:rows(p=1)", f"{spec}:{there}(p=1)", out={"w": out})

    def checked(way: str, act: Callable[[], object], wanted: torch.Tensor) -> tuple[float]:
        out.zero_()
        taken = timed(act, device)
        assert same(out, wanted), f"{way}: other numbers"
        return (taken,)

    def measure() -> None:
        store = f"file://{folder}/store-{time.monotonic_ns()}"
        dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
        try:
            cut = DTensor.from_local(given, DeviceMesh(device.type, [0]), [Shard(0)], run_check=False)
            ways: dict[str, tuple[Callable[[], object], torch.Tensor]] = {
                "copy_ alone": (lambda: out.copy_(given), given),
                f"reshard by {backend}, by row to by column": (lambda: resharded("columns"), given),
                "DTensor.redistribute, the same, and copy_": (
                    lambda: out.copy_(cut.redistribute(placements=[Shard(1)]).to_local()), given),
                "copy_ of the transposed tensor alone": (lambda: out.copy_(given.t()), given.t()),
                f"reshard by {backend}, transposed": (lambda: resharded("turned"), given.t()),
            }  # fmt: skip
            for _ in range(5):
                for way, (act, wanted) in ways.items():
                    found.repeat(way, partial(checked, way, act, wanted))
        finally:
            dist.destroy_process_group()

    yield from until_late(measure, found)
    for way, (seconds,) in found.columns():
        yield way, shown(seconds), f"{given.nbytes / statistics.median(seconds) / 1e9:.2f} GB/s"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (8, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.down(F.gelu(self.up(self.after(x))))
        return result


def training(found: Measured, device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """Milliseconds of a training step during a save, and the save's pause."""
    blocks, steps = 12, 15
    width = max(64, int((size / (12 * 12 * blocks)) ** 0.5) // 64 * 64)
    batch, long = (8, 1024) if device.type == "cuda" else (1, 64)
    with device:
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, long, width, device=device)
    pending: list[Any] = []

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    def stepped(is_done: Callable[[int], bool]) -> float:
        """Seconds of a step, until it is done."""
        wait(device)
        begin, count = time.perf_counter(), 0
        while not count or not is_done(count):
            step()
            wait(device)
            count += 1
        return (time.perf_counter() - begin) / count

    def saved(number: int, keep: Callable[[int], object], is_done: Callable[[int], bool]) -> tuple[float, ...]:
        stopped = timed(partial(keep, number), device)
        return stopped, stepped(lambda _: is_done(number))

    def measure() -> None:
        with alone(folder) as group, vault_at(folder / "training") as vault, vault.writer(0) as writer:
            ((dcp_way, more),) = (cached(device) or {"DCP async_save": {}}).items()

            def by_dcp(_: int) -> None:
                state = state_of(model, optimizer)
                pending[:] = [async_save(state, checkpoint_id=folder / "trained", process_group=group, **more)]

            def by_torch(_: int) -> None:
                torch.save(state_of(model, optimizer), folder / "trained.pt")

            def is_kept(number: int) -> bool:
                if writer.error is not None:
                    raise writer.error
                return bool((writer.committed() or (0, -1))[1] == number)

            def by_vault(number: int) -> None:
                writer.save(number, (model, optimizer))

            def is_done(_: int) -> bool:
                return bool(pending[0].done())

            step()
            for _ in range(2):
                found.repeat("no save", lambda: (0.0, stepped(lambda count: count == steps)))
            for i in range(4):
                found.repeat("vault", partial(saved, i, by_vault, is_kept))
            for i in range(3):
                found.repeat(dcp_way, partial(saved, i, by_dcp, is_done))
            for i in range(2):
                found.repeat("torch.save", partial(saved, i, by_torch, lambda _: True))

    yield from until_late(measure, found)
    total, base = 12 * sum(p.numel() for p in model.parameters()), float("nan")
    for way, (stopped, taken) in found.columns():
        mine = statistics.median(taken)
        if way == "no save":
            base = mine
            yield way, f"{mine * 1e3:.1f} ms", "", ""
        else:
            yield f"{way} ({total / 1e9:.1f} GB)", f"{mine * 1e3:.1f} ms", f"{mine / base - 1:+.1%}", shown(stopped)
    shutil.rmtree(folder / "training", ignore_errors=True)
    shutil.rmtree(folder / "trained", ignore_errors=True)
    (folder / "trained.pt").unlink(missing_ok=True)


# ---- Phases of a save --------------------------------------------------------------------------------------------------------

PHASES: list[tuple[type, str, str]] = [
    (Writer, "_settle", "wait until the save before counts"),
    (Writer, "_collect", "list what is saved"),
    (Writer, "_save", "all that follows"),
    (Arenas, "copy", "- copy, in all"),
    (Arenas, "_room", "- - have memory, and map it"),
    (Cuda, "pin", "- - pin it"),
    (Cuda, "reaches", "- - see that it is pinned still"),
    (Cuda, "room", "- - page-locked buckets"),
    (Cuda, "begin", "- - begin copies"),
    (torch.cuda.Event, "synchronize", "- - wait for copies"),
]


@contextmanager
def watched(spent: dict[str, float]) -> Iterator[None]:
    """Sum the seconds of each phase."""

    def with_clock(act: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def clocked(*given: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return act(*given, **more)
            finally:
                spent[phase] = spent.get(phase, 0.0) + time.perf_counter() - begin

        return clocked

    with ExitStack() as ends:
        for owner, name, phase in PHASES:
            was = getattr(owner, name)
            ends.callback(setattr, owner, name, was)
            setattr(owner, name, with_clock(was, phase))
        yield


def phases(found: Measured, device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """Seconds of each phase of several saves.

    The first two use new slots.
    """
    state = {f"w{i}": torch.randn(size // 32 // 4, device=device) for i in range(32)}
    saves: list[dict[str, float]] = []

    def one(writer: Any, step: int) -> tuple[float]:
        spent: dict[str, float] = {}
        begin = time.perf_counter()
        with watched(spent):
            taken = timed(partial(writer.save, step, state), device)
        beside = time.perf_counter()
        writer._join()
        digested = time.perf_counter()
        counted(writer, step)
        now = time.perf_counter()
        saves.append(
            {"the job waits": taken, **spent, "digests, beside the job": digested - beside}
            | {"the server, until it counts": now - digested, "in all": now - begin}
        )
        return (taken,)

    def measure() -> None:
        with vault_at(folder / "phases") as vault, vault.writer(0) as writer:
            for step in range(5):
                found.repeat("vault", partial(one, writer, step))

    yield from until_late(measure, found)
    for phase in dict.fromkeys(phase for each in saves for phase in each):
        yield phase, " / ".join(f"{each[phase]:.3f}" if phase in each else "none" for each in saves), "s"
    shutil.rmtree(folder / "phases", ignore_errors=True)
    state.clear()
    yield from raw(device, folder, size)


def raw(device: torch.device, folder: Path, size: int) -> Iterator[tuple[str, ...]]:
    """The time of each kind of copy alone, to a slot's file."""

    def row(what: str, act: Callable[[], object]) -> tuple[str, ...]:
        taken = timed(act, device)
        return what, f"{taken:.3f}", f"s, {size / taken / 1e9:.1f} GB/s"

    made: list[mmap.mmap] = []
    path, room = folder / "raw", torch.zeros(32 << 20, dtype=torch.uint8, pin_memory=device.type == "cuda")
    with path.open("w+b") as file:
        yield row("have memory", lambda: os.posix_fallocate(file.fileno(), 0, size))
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        yield row("map it", lambda: made.append(mmap.mmap(file.fileno(), size, flags=flags)))
    memory = torch.frombuffer(made[0], dtype=torch.uint8)
    into, bucket = memoryview(made[0]), room.numpy().data

    def by_one_thread() -> None:
        for low in range(0, size, len(bucket)):
            into[low : low + len(bucket)] = bucket[: size - low]

    def by_torch() -> None:
        for low in range(0, size, len(bucket)):
            memory[low : low + len(bucket)].copy_(room[: size - low])

    yield row("copy page-locked buckets there, one thread", by_one_thread)
    yield row(f"copy page-locked buckets there, {torch.get_num_threads()} threads", by_torch)
    if device.type == "cuda":
        far, lane = torch.ones(size, dtype=torch.uint8, device=device), Cuda(device)
        yield row("copy from the GPU there, not pinned", lambda: memory.copy_(far))
        told: list[bool] = []
        yield row("pin it", lambda: told.append(lane.pin(memory)))
        if told[0]:
            yield row("copy from the GPU there, pinned", lambda: lane.begin([(far, memory)]).synchronize())
            yield row("copy from the GPU there, pinned, again", lambda: lane.begin([(far, memory)]).synchronize())
            yield "the bytes are there", str(bool(memory[:: 1 << 12].min() == 1)), ""
            yield row("let it go", lambda: lane.unpin(memory))
        else:
            yield "the driver does not pin it", "", ""
    path.unlink()


def table(title: str, head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[tuple[str, ...]]:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |", flush=True)
    found = []
    for row in rows:
        print(f"| {' | '.join((*row, *('',) * (len(head) - len(row))))} |", flush=True)
        found.append(row)
    return found


def found_formats(folder: Path) -> None:
    """The source tree's formats, as entry points of an installed package."""
    if next(entry_points("ucpl.formats"), None) is None:
        with (Path(__file__).parents[1] / "pyproject.toml").open("rb") as file:
            groups = tomllib.load(file)["project"]["entry-points"]
        made = folder / "installed" / "ucpl.egg-info"
        made.mkdir(parents=True)
        lines = (f"[{group}]\n" + "".join(f"{a} = {b}\n" for a, b in some.items()) for group, some in groups.items())
        (made / "entry_points.txt").write_text("".join(lines))
        sys.path.append(str(made.parent))


def place(asked: str | None) -> str:
    """A folder in memory if it has room, else on a disk."""
    if asked is not None:
        return asked
    enough = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 40 << 30
    return "/dev/shm" if enough else tempfile.gettempdir()


def checked(kind: str, seconds: float, device: torch.device, folder: Path) -> list[tuple[str, str]]:
    """Checks of one kind, with a line for each that fails."""
    begin = time.monotonic()
    try:
        with within(seconds):
            if kind == "ranks":
                found = between_ranks(device, folder)
            else:
                found = outcomes((vault_checks if kind == "vault" else process_checks)(device, folder))
    except Late:
        found = [(kind, "no time was left")]
    for name, error in found:
        if error:
            print(f"FAILED {name}: {error}")
    failed = sum(bool(error) for _, error in found)
    print(f"\n{kind}: {len(found)} checks, {failed} failed, {time.monotonic() - begin:.0f} s", flush=True)
    return [one for one in found if one[1]]


TABLES: dict[str, tuple[str, tuple[str, ...], Callable[..., Iterator[tuple[str, ...]]], int]] = {
    "loads": ("Loading", ("way", "seconds", "rate"), loads, 1),
    "training": ("Training", ("way", "a step while it is saved", "slow-down", "a save stops it for"), training, 2),
    "saves": ("Saving", ("way", "the job waits", "until it is there"), saves, 1),
    "reshard": ("Another layout", ("way", "seconds", "rate"), reshards, 1),
    "phases": ("Phases of saves in a vault", ("phase", "each save", ""), phases, 1),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="use tensors of the CPU")
    parser.add_argument("--gib", type=float, help="size of a state that is timed (default 1, with --cpu 0.06)")
    parser.add_argument("--folder", help="for files and vaults (default /dev/shm if it has room)")
    parser.add_argument("--json", help="a file for all results")
    parser.add_argument("--tables", default=",".join(SECONDS), help="some of %(default)s, in this order")
    parser.add_argument("--phases", action="store_true", help="the same as --tables phases")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds in all (default %(default)s)")
    given = parser.parse_args()
    asked = ["phases"] if given.phases else given.tables.split(",")
    if unknown := set(asked) - set(SECONDS):
        parser.error(f"no table is named {', '.join(sorted(unknown))}: the tables are {', '.join(SECONDS)}")
    if not (given.cpu or torch.cuda.is_available()):
        print("there is no GPU: nothing was checked or timed (--cpu uses the CPU)")
        return 0
    warnings.simplefilter("ignore")
    os.environ["UCPL_CACHE"] = ""
    device = torch.device("cpu") if given.cpu else torch.device("cuda", 0)
    card = "CPU" if given.cpu else torch.cuda.get_device_name(device)
    size = int((given.gib or (0.06 if given.cpu else 1)) * 2**30) // 4096 * 4096
    where = place(given.folder)
    print(f"{card}, torch {torch.__version__}, Python {sys.version.split()[0]}, files in {where}", flush=True)
    results: dict[str, Any] = {"card": card, "torch": torch.__version__, "tables": {}, "failed": []}
    with tempfile.TemporaryDirectory(dir=where, prefix="ucpl-gpu-") as top:
        folder = Path(top)
        found_formats(folder)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
        prepared(folder)
        for name in asked:
            seconds = min(SECONDS[name] * given.limit / LIMIT, BEGIN + given.limit - 5 - time.monotonic())
            if name not in TABLES:
                results["failed"] += checked(name, seconds, device, folder)
                continue
            title, head, rows, divisor = TABLES[name]
            begin, heads = time.monotonic(), f"{title}, {size / divisor / 2**30:.2f} GiB on {card}"
            try:
                results["tables"][name] = table(heads, head, rows(Measured(seconds), device, folder, size // divisor))
            except Exception as error:  # the other tables still count
                traceback.print_exc()
                results["failed"].append((name, f"{type(error).__name__}: {str(error)[:300]}"))
                print(f"FAILED {name}: {type(error).__name__}", flush=True)
            print(f"\n{time.monotonic() - begin:.0f} s", flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - BEGIN:.0f} s in all", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n")
    return 1 if results["failed"] else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        ranks_main()
    sys.exit(main())
