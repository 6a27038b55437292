"""Tensors on a GPU in `reshard`, `load_into` and a vault: checks against torch's own slicing, then timings next to DCP.

    python -m pip install --target /tmp/site lark && PYTHONPATH=/tmp/site:. python3 -m benchmarks.gpu [--json FILE]

One GPU, torch and lark are enough (2 ranks share the GPU by gloo). The script takes less than 4 minutes, prints a line for each
check and two tables with the name of the card, and exits with 1 if a check fails. Without a GPU it says so and exits with 0.
`--cpu` runs the same with tensors of the CPU and small sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
from ucpl.vault import Vault

SHAPE = (4, 6, 2, 3)
RANKS = 2
LIMIT = 230  # seconds, after which the script ends itself
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
    """The same numbers in memory in several ways. Keys that begin with `read` cannot be filled."""
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
    """Whether two tensors have the same bits, as torch itself reads them."""
    left, right = (
        t.detach().cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for t in (one, other)
    )
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(left, right)


def demand(found: torch.Tensor, wanted: torch.Tensor, device: torch.device | None = None) -> None:
    assert same(found, wanted), f"other numbers: {found.flatten()[:4]} is not {wanted.flatten()[:4]}"
    assert device is None or found.device.type == device.type, f"it is on {found.device}"


def outcomes(checks: Iterator[Check]) -> list[tuple[str, str]]:
    """(name, error) of each check; an empty error is a pass."""
    found = []
    for name, act in checks:
        try:
            act()
            found.append((name, ""))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            if isinstance(error, TimeoutError):
                raise
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


def between_ranks(device: torch.device, folder: Path) -> list[tuple[str, str]]:
    for name in DTYPES:
        (folder / f"{name}.ucpl").write_text(SPEC.format(dtype=name))
    save({"model": {name: numbers(dtype) for name, dtype in DTYPES.items()}}, checkpoint_id=folder / "odd")
    command = [sys.executable, "-m", "benchmarks.gpu", "--rank"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(device), str(folder)], stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    found: list[tuple[str, str]] = []
    for rank, one in enumerate(ranks):
        try:
            said = one.communicate(timeout=90)[1]
        except subprocess.TimeoutExpired:
            one.kill()
            said = "no end within 90 s"
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
    """Wait until what was saved counts."""
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
    with vault_at(folder / "vault") as vault, vault.writer(0) as writer:
        yield "vault: odd tensors there and back", partial(vault_odd, device, folder, writer)
        yield "vault: changed right after the save", partial(vault_changed, device, folder, writer)
        if device.type == "cuda":
            yield "vault: kernels still running, another stream", partial(vault_late, device, folder, writer)
    yield "vault: gradients alone, replayed", partial(vault_replayed, device, folder)
    if device.type == "cuda":
        for backend in ("nccl", "cpu:gloo,cuda:nccl"):
            yield f"reshard in a group of {backend}", partial(by_backend, backend, device, folder)


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


def back(folder: Path, truth: Mapping[str, torch.Tensor], name: str) -> None:
    """What the vault has, by our reader, and by torch's own of what `persist` writes."""
    url, persisted = f"vault:{folder}/{name}", folder / f"persisted-{time.monotonic_ns()}"
    for how in (ucpl.StorageReader(url, model="{name}"), None):
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
    back(folder, truth, "vault")


def vault_late(device: torch.device, folder: Path, writer: Any) -> None:
    """What kernels compute that were begun before the save, also on a stream of the caller's."""
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
        back(folder, {"w": torch.full((16 << 20,), float(step))}, "vault")


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


def cached(device: torch.device) -> dict[str, dict[str, Any]]:
    """async_save by page-locked memory that it keeps from save to save, where there is a GPU."""
    if device.type == "cpu":
        return {}
    return {"DCP async_save, cached staging": {"async_stager": BlockingAsyncStager(cache_staged_state_dict=True)}}


def saves(device: torch.device, folder: Path, size: int, rounds: int) -> Iterator[tuple[str, str, str]]:
    """(way, seconds in which the job waits, seconds until it is committed) of a state of so many bytes."""
    state = {f"w{i}": torch.randn(size // 32 // 4, device=device) for i in range(32)}
    room = torch.empty(size // 32 // 4, pin_memory=device.type == "cuda")
    found: dict[str, tuple[list[float], list[float]]] = {}

    def note(way: str, stalled: float, all_of_it: float) -> None:
        for into, value in zip(found.setdefault(way, ([], [])), (stalled, all_of_it), strict=True):
            into.append(value)

    group = dist.new_group(backend="gloo")
    dcp_ways: dict[str, dict[str, Any]] = {"DCP async_save": {}, **cached(device)}
    with vault_at(folder / "timed") as vault, vault.writer(0) as writer:
        for i in range(rounds):
            copied = timed(lambda: [room.copy_(t) for t in state.values()], device)
            note("copy to page-locked memory alone", copied, copied)
            begin = time.perf_counter()
            stalled = timed(partial(writer.save, i, state), device)
            counted(writer, i)
            note("vault", stalled, time.perf_counter() - begin)
            for way, more in dcp_ways.items():
                made: list[Any] = []

                def saved(made: list[Any] = made, more: Any = more) -> None:
                    made.append(async_save(state, checkpoint_id=folder / "dcp", process_group=group, **more))

                begin = time.perf_counter()
                stalled = timed(saved, device)
                made[0].result()
                note(way, stalled, time.perf_counter() - begin)
            saved_by = timed(lambda: torch.save(state, folder / "state.pt"), device)
            note("torch.save", saved_by, saved_by)
    for way, (stalls, alls) in found.items():
        yield way, shown(stalls[1:]), shown(alls[1:])
    shutil.rmtree(folder / "timed")
    shutil.rmtree(folder / "dcp")
    (folder / "state.pt").unlink()


def loads(device: torch.device, folder: Path, size: int, rounds: int) -> Iterator[tuple[str, str, str]]:
    """(way, seconds, GB a second) of weights in files that the page cache has, into a model on the device."""
    from safetensors.torch import load_file, save_file

    side = int((size / 32 / 2) ** 0.5) // 8 * 8
    with device:
        model = nn.ModuleList(nn.Linear(side, side, bias=False, dtype=torch.bfloat16) for _ in range(32))
    state = model.state_dict()
    truth = {name: value.cpu().clone() for name, value in state.items()}
    file = folder / "model.safetensors"
    save_file(truth, file)
    save({"model": state}, checkpoint_id=folder / "weights")
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
    taken: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, act in ways.items():
            for value in state.values():
                value.zero_()
            taken[way].append(timed(act, device))
            for name, value in model.state_dict().items():
                assert same(value, truth[name]), f"{way}: {name} has other numbers"
    total = sum(value.nbytes for value in truth.values())
    for way, seconds in taken.items():
        yield way, shown(seconds[1:]), f"{total / statistics.median(seconds[1:]) / 1e9:.2f} GB/s"
    file.unlink()
    shutil.rmtree(folder / "weights")


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


def training(device: torch.device, folder: Path, size: int, steps: int) -> Iterator[tuple[str, str, str]]:
    """(way, milliseconds of a step, slow-down) of a GPT that saves at every fifth step."""
    blocks = 12
    width = max(64, int((size / (12 * 12 * blocks)) ** 0.5) // 64 * 64)
    batch, long = (8, 1024) if device.type == "cuda" else (1, 64)
    with device:
        model = nn.Sequential(*(Block(width) for _ in range(blocks)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(batch, long, width, device=device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()

    group = dist.new_group(backend="gloo")
    ((dcp_way, more),) = (cached(device) or {"DCP async_save": {}}).items()
    pending: list[Any] = []
    with vault_at(folder / "training") as vault, vault.writer(0) as writer:

        def by_dcp() -> None:
            for one in pending:
                one.result()
            state = state_of(model, optimizer)
            pending[:] = [async_save(state, checkpoint_id=folder / "trained", process_group=group, **more)]

        ways: dict[str, Callable[[int], object]] = {
            "no save": lambda i: None,
            "vault": lambda i: writer.save(i, (model, optimizer)),
            dcp_way: lambda i: by_dcp(),
            "torch.save": lambda i: torch.save(state_of(model, optimizer), folder / "trained.pt"),
        }
        for first in ways.values():
            step()
            first(0)
        base = 0.0
        total = 12 * sum(p.numel() for p in model.parameters())
        for way, kept in ways.items():
            with suppress(IndexError):
                pending.pop().result()
            wait(device)
            begin = time.perf_counter()
            stalls = []
            for i in range(steps):
                step()
                if i % 5 == 0:
                    stalls.append(timed(partial(kept, i + 1), device))
            wait(device)
            taken = (time.perf_counter() - begin) / steps
            base = base or taken
            stalled = f"{statistics.median(stalls):.3f} s" if way != "no save" else ""
            name = f"{way} ({total / 1e9:.1f} GB)"
            yield name, f"{taken * 1e3:.1f} ms", f"{taken / base - 1:+.1%}; a save stops it for {stalled}"
        for one in pending:
            one.result()


def table(title: str, head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> list[tuple[str, ...]]:
    print(f"\n{title}\n\n| {' | '.join(head)} |\n| {' | '.join('---' for _ in head)} |", flush=True)
    found = []
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
        found.append(row)
    return found


def place(asked: str | None) -> str:
    """A folder in memory if it has room, else one on a disk."""
    if asked is not None:
        return asked
    enough = os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 40 << 30
    return "/dev/shm" if enough else tempfile.gettempdir()


def late(*_: object) -> None:
    raise TimeoutError(f"not done within {LIMIT} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="use tensors of the CPU")
    parser.add_argument("--gib", type=float, help="size of a state that is timed (default 4, with --cpu 0.06)")
    parser.add_argument("--folder", help="for files and vaults (default /dev/shm if it has room)")
    parser.add_argument("--json", help="a file for all results")
    given = parser.parse_args()
    if not (given.cpu or torch.cuda.is_available()):
        print("there is no GPU: nothing was checked or timed (--cpu uses the CPU)")
        return 0
    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    warnings.simplefilter("ignore")
    os.environ["UCPL_CACHE"] = ""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path[1:]])
    device = torch.device("cpu") if given.cpu else torch.device("cuda", 0)
    card = "CPU" if given.cpu else torch.cuda.get_device_name(device)
    size = int((given.gib or (0.06 if given.cpu else 4)) * 2**30)
    begin, where = time.perf_counter(), place(given.folder)
    print(f"{card}, torch {torch.__version__}, Python {sys.version.split()[0]}, files in {where}", flush=True)
    results: dict[str, Any] = {"card": card, "torch": torch.__version__}
    with tempfile.TemporaryDirectory(dir=where, prefix="ucpl-gpu-") as top:
        folder = Path(top)
        found = between_ranks(device, folder) + outcomes(process_checks(device, folder))
        for name, error in found:
            if error:
                print(f"FAILED {name}: {error}")
        failed = sum(bool(error) for _, error in found)
        took = time.perf_counter() - begin
        print(f"{len(found)} checks, {failed} failed, {took:.0f} s", flush=True)
        results["failed"] = [one for one in found if one[1]]
        dist.init_process_group("gloo", init_method=f"file://{folder}/store-timed", rank=0, world_size=1)
        heads = f"{size / 2**30:.2f} GiB on {card}"
        results["tables"] = [
            table(f"Saving {heads}", ("way", "the job waits", "until it is there"), saves(device, folder, size, 5)),
            table(f"Loading {heads}", ("way", "seconds", "rate"), loads(device, folder, size, 4)),
            table(f"Training on {card}", ("way", "a step", "slow-down"), training(device, folder, size // 2, 20)),
        ]
        dist.destroy_process_group()
    print(f"\n{time.perf_counter() - begin:.0f} s in all", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(results, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        ranks_main()
    sys.exit(main())
