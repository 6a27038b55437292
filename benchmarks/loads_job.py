"""Time ways to load a checkpoint into a job.

Run by torchrun; each way comes in turn.

torchrun --nproc-per-node N benchmarks/loads_job.py make FOLDER LAYERS: a Llama under FSDP2, saved by DCP after a step.
torchrun --nproc-per-node N benchmarks/loads_job.py time FOLDER LAYERS ROUNDS [WAY...]: the first rank prints JSON.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import ucpl

WIDTH, WIDE, TOKENS = 768, 2048, 8192
CLEAR = "5"  # to /proc/self/clear_refs: the peak of resident memory begins anew
Load = Callable[[], Any]


def llama(layers: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TOKENS, hidden_size=WIDTH, intermediate_size=WIDE, num_hidden_layers=layers, num_attention_heads=12,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def sharded(layers: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A Llama under FSDP2, and its AdamW."""
    model: Any = llama(layers, seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def step(model: Callable[..., Any], backward: Callable[[torch.Tensor], object] = torch.Tensor.backward) -> None:
    """The forward and backward of one small batch."""
    tokens = torch.randint(0, TOKENS, (1, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
    backward(model(input_ids=tokens, labels=tokens).loss)


def make(folder: Path, layers: int) -> None:
    """A checkpoint of DCP after one step, with its model's configuration."""
    model, optimizer = sharded(layers, 0)
    step(model)
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=folder / "dcp")
    if dist.get_rank() == 0:
        model.config.save_pretrained(folder / "hf")  # type: ignore[operator, union-attr]


# ---- The ways ----------------------------------------------------------------------------------------------------------------


class Sharded:
    """A model under FSDP2 and an optimizer without a step.

    begun: the optimizer has its states already, so that the load alone is timed.
    """

    def __init__(self, layers: int, begun: bool = False) -> None:
        self.model, self.optimizer = sharded(layers, 1)
        self.begun = begun

    def spoil(self) -> None:
        """Other numbers, and no states and gradients."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(7.0)
        self.model.zero_grad()
        self.optimizer.state.clear()
        if self.begun:
            get_state_dict(self.model, self.optimizer)

    def step(self) -> None:
        step(self.model)

    def sums(self) -> list[float]:
        """The sum of each weight and state of this rank."""
        found: list[float] = []
        for parameter in self.model.parameters():
            states = self.optimizer.state[parameter]
            for one in (parameter, states["exp_avg"], states["exp_avg_sq"]):
                found.append(part(one).double().sum().item())
        return [*found, float(self.optimizer.state[next(iter(self.model.parameters()))]["step"])]

    def ours(self, source: Path) -> None:
        ucpl.load_into(self.model, self.optimizer, source)

    def through(self, source: Path, reader: type[Any] | None = None) -> None:
        """As the documentation of torch.distributed.checkpoint has it."""
        weights, states = get_state_dict(self.model, self.optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=source) if reader is None else dcp.load(state, storage_reader=reader(source))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def part(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = tensor.detach()
    return getattr(found, "to_local", lambda: found)()


class Engine:
    """An engine of DeepSpeed at stage 1."""

    def __init__(self, layers: int, universal: bool = False) -> None:
        import deepspeed

        model = llama(layers, 1)
        config = {
            "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "checkpoint": {"load_universal": universal}, "steps_per_print": 10**9,
        }  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def spoil(self) -> None:
        with torch.no_grad():
            for parameter in self.engine.module.parameters():
                parameter.fill_(7.0)
        self.engine.optimizer.zero_grad()

    def step(self) -> None:
        step(self.engine, self.engine.backward)

    def sums(self) -> list[float]:
        return [parameter.detach().double().sum().item() for parameter in self.engine.module.parameters()]

    def ours(self, source: Path) -> None:
        ucpl.load_into(self.engine, self.engine.optimizer, source)

    def theirs(self, source: Path) -> None:
        found, _ = self.engine.load_checkpoint(str(source))
        assert found is not None


class Weights:
    """A model of this rank alone, without an optimizer."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.model = llama(layers, 1)

    def spoil(self) -> None:
        self.model = llama(1, 1)
        gc.collect()

    def empty(self) -> nn.Module:
        """Without values: every way fills them."""
        with torch.device("meta"):
            made = llama(self.layers)
        return made

    def step(self) -> None:
        step(self.model)

    def sums(self) -> list[float]:
        return [parameter.detach().double().sum().item() for parameter in self.model.parameters()]

    def ours(self, source: Path) -> None:
        self.model = self.empty().to_empty(device="cpu")
        buffers(self.model)
        ucpl.load_into(self.model, None, source)

    def pretrained(self, source: Path) -> None:
        self.model = LlamaForCausalLM.from_pretrained(source)

    def load_file(self, source: Path) -> None:
        from safetensors.torch import load_file

        self.model = self.empty()
        state = {
            name: tensor for path in sorted(source.glob("*.safetensors")) for name, tensor in load_file(path).items()
        }
        self.model.load_state_dict(state, assign=True)
        buffers(self.model)

    def fast(self, source: Path) -> None:
        """By fastsafetensors, without GPUDirect Storage."""
        from fastsafetensors import fastsafe_open

        self.model = self.empty()
        with fastsafe_open(sorted(map(str, source.glob("*.safetensors"))), nogds=True, device="cpu") as file:
            state = {name: file.get_tensor(name).clone() for name in list(file.keys())}
        self.model.load_state_dict(state, assign=True)
        buffers(self.model)

    def streamed(self, source: Path) -> None:
        """By Run:ai's streamer.

        A tensor is valid until the next one is taken.
        """
        from runai_model_streamer import SafetensorsStreamer

        self.model = self.empty()
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(sorted(map(str, source.glob("*.safetensors"))))
            state = {name: tensor.clone() for name, tensor in streamer.get_tensors()}
        self.model.load_state_dict(state, assign=True)
        buffers(self.model)


def buffers(model: nn.Module) -> None:
    """Frequencies of rotary embeddings, which no checkpoint has."""
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            fresh = type(module)(model.config)  # type: ignore[call-arg]
            for key, value in fresh.named_buffers():
                module.register_buffer(key, value, persistent=False)


WEIGHTS = {
    "`from_pretrained`": "pretrained", "safetensors' `load_file`": "load_file", "fastsafetensors": "fast",
    "Run:ai's streamer": "streamed", "`load_into`": "ours",
}  # fmt: skip
KINDS: dict[str, Callable[[int], Any]] = {
    "fsdp2": Sharded,
    "fsdp2, states at hand": partial(Sharded, begun=True),
    "engine": Engine,
    "engine, universal": partial(Engine, universal=True),
    "weights": Weights,
}


def ways(folder: Path, made: Callable[[str], Any]) -> Iterator[tuple[str, str, Load]]:
    """(kind, way, call)."""
    same, four, stored = folder / f"zero1-{dist.get_world_size()}", folder / "zero1-4", folder / "dcp"
    for kind in ("fsdp2", "fsdp2, states at hand"):
        yield kind, "`dcp.load`", lambda kind=kind: made(kind).through(stored)
        yield kind, "`load_into`, from ZeRO-1 of 4 ranks", lambda kind=kind: made(kind).ours(four)
    yield "fsdp2", "`load_into`, from DCP's folder", lambda: made("fsdp2").ours(stored)
    yield "fsdp2", "`StorageReader`, from ZeRO-1 of 4 ranks", lambda: made("fsdp2").through(four, ucpl.StorageReader)
    yield "engine", "`load_checkpoint`", lambda: made("engine").theirs(same)
    yield "engine, universal", "`load_checkpoint`", lambda: made("engine, universal").theirs(folder / "universal")
    yield "engine", "`load_into`, from ZeRO-1 of 4 ranks", lambda: made("engine").ours(four)
    for way, name in WEIGHTS.items():
        yield "weights", way, lambda name=name: getattr(made("weights"), name)(folder / "hf")


# ---- Measuring ---------------------------------------------------------------------------------------------------------------


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) << 10
    raise LookupError(name)


def read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def measured(call: Load, step: Callable[[], None]) -> dict[str, float]:
    """Seconds until loaded and until the first step, bytes and memory.

    Bytes of all ranks; the most memory that a rank needs more.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # memory that an earlier way left is new memory again
    Path("/proc/self/clear_refs").write_text(CLEAR)
    resident, before = status("VmRSS"), read()
    dist.barrier()
    used = time.process_time()
    begin = time.perf_counter()
    call()
    mine, core = time.perf_counter() - begin, time.process_time() - used
    dist.barrier()
    loaded = time.perf_counter() - begin
    counts = torch.tensor([float(read() - before), core])
    peak = torch.tensor([float(status("VmHWM") - resident), mine])
    step()
    dist.barrier()
    first = time.perf_counter() - begin
    dist.all_reduce(counts)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    return {"loaded": loaded, "step": first, "read": counts[0].item(), "core": counts[1].item(), "peak": peak[0].item()}


def main() -> None:
    what, folder, layers = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if what == "make":
        make(folder, layers)
    else:
        answer = timed(folder, layers, int(sys.argv[4]), sys.argv[5:])
        if dist.get_rank() == 0:
            print(json.dumps(answer), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def timed(folder: Path, layers: int, rounds: int, asked: list[str]) -> dict[str, list[dict[str, float]]]:
    """The measurements of each way.

    Ways of one group come in turn; the step is made in the last round alone.
    """
    found: dict[str, list[dict[str, float]]] = {}
    for group in ("fsdp2", "engine", "weights"):
        held: dict[str, Any] = {}

        def made(kind: str, held: dict[str, Any] = held) -> Any:
            if kind not in held:
                held[kind] = KINDS[kind](layers)
            return held[kind]

        chosen = [
            (kind, way, call)
            for kind, way, call in ways(folder, made)
            if kind.startswith(group) and (not asked or any(f"{kind}: {way}".startswith(one) for one in asked))
        ]
        known: list[float] = []
        for i in range(rounds):
            for kind, way, call in chosen:
                it = made(kind)
                it.spoil()
                act = it.step if i + 1 == rounds else lambda: None
                found.setdefault(f"{kind}: {way}", []).append(measured(call, act))
                sums = it.sums()
                known = known or sums
                assert sums == known, f"{kind}: {way}: other numbers"
        held.clear()
        gc.collect()
    return found


if __name__ == "__main__":
    main()
