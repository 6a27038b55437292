"""A tiny GPT on four ranks with a vault, killed at random.

The vault keeps each step. python tests/interop/vault_job.py JOB.json: DeepSpeed's ZeRO-1 or FSDP2; a number of kills,
of one rank, of all, of a server, or of a node, which is a rank, its server and its folder. After each, ranks with other
weights restart from memory. It ends with the state of the last step, its losses, and its result on other ranks and, of
FSDP2, with tensor parallelism. All processes are forked from this one, which has all imports.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[2]))
import ucpl
from tests.interop.deepspeed_job import preload
from ucpl.vault import Vault
from ucpl.vault.server import Server

WORLD, BATCH, WORDS, WIDTH = 4, 24, 61, 40
EACH = ("node", "server", "rank", "all")  # kinds of kills: first one of each
AHEAD = 4  # steps that are kept, less one, before something is killed
EVERY: set[int] = set()  # processes that were begun and are not known to have ended
SECONDS = 120.0  # of one life, on a busy machine; plus two for each step


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.drop(self.down(F.gelu(self.up(self.after(x)))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embed(words[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), words[:, 1:].flatten())


def batch(step: int) -> torch.Tensor:
    begin = torch.randint(0, WORDS, (BATCH, 1), generator=torch.Generator().manual_seed(step))
    return (begin * 3 ** torch.arange(12)) % WORDS


class Zero1:
    """DeepSpeed in bf16, masters and moments over all ranks."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        model = Model()
        config = {
            "train_batch_size": BATCH,
            "train_micro_batch_size_per_gpu": BATCH // dist.get_world_size(),
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "gradient_clipping": 1.0,
            "steps_per_print": 10**9,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.kept = self.engine

    def step(self, words: torch.Tensor) -> torch.Tensor:
        loss = self.engine(words)
        self.engine.backward(loss)
        self.engine.step()
        return loss

    def load(self, source: str) -> None:
        ucpl.load_into(self.engine, self.engine.optimizer, source)

    def state(self) -> list[torch.Tensor]:
        """Weights, masters and moments, equal on any number of ranks."""
        optimizer, found = self.engine.optimizer, []
        for part, params in zip(optimizer.single_partition_of_fp32_groups, optimizer.bit16_groups, strict=True):
            states = optimizer.optimizer.state[part]
            for mine in (part.detach(), states["exp_avg"], states["exp_avg_sq"]):
                parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, mine)
                found.append(torch.cat(parts)[: sum(param.numel() for param in params)])
            found += [param.detach().view(torch.int16) for param in params]
        return [*found, torch.tensor(self.engine.global_steps)]


class Fsdp2:
    """Modules and AdamW under FSDP; with tp, on two mesh dims."""

    def __init__(self, seed: int, tp: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        world = dist.get_world_size()
        if tp > 1:
            mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
            for block in self.model.blocks:
                parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            over = mesh["dp"]
        else:
            over = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
        for block in self.model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(self.model, mesh=over)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.kept = (self.model, self.optimizer)

    def step(self, words: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()  # gradients of a step are there when it is saved
        loss: torch.Tensor = self.model(words)
        loss.backward()
        self.optimizer.step()
        return loss

    def load(self, source: str) -> None:
        ucpl.load_into(self.model, self.optimizer, source)

    def state(self) -> list[torch.Tensor]:
        how = StateDictOptions(full_state_dict=True)
        weights = get_model_state_dict(self.model, options=how)
        states: Any = get_optimizer_state_dict(self.model, self.optimizer, options=how)["state"]
        told = [torch.as_tensor(weights[name]) for name in sorted(weights)]
        for name in sorted(states):
            told += [torch.as_tensor(states[name][one]) for one in sorted(states[name])]
        return told


KINDS: dict[str, Callable[[int], Any]] = {"zero1": Zero1, "fsdp2": Fsdp2, "fsdp2 tp2": lambda seed: Fsdp2(seed, 2)}


def digest(state: list[torch.Tensor]) -> str:
    told = hashlib.sha256()
    for one in state:
        told.update(one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return told.hexdigest()[:16]


def newest(home: Path) -> tuple[str, dict[str, Any]]:
    """The first state of all ranks.

    The first one's snapshot, and its values.
    """
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        commit = Vault.at(home).committed()
        told = [None if commit is None else (commit.generation, [shard.state for shard in commit.shards])]
    dist.broadcast_object_list(told, src=0)
    if told[0] is None:
        return "", {}
    generation, states = told[0]
    return f"vault:{home}@{generation}", states[dist.get_rank() % len(states)]


def train(kind: str, home: Path, life: int, steps: int, result: Path) -> None:
    """One life of a rank.

    It begins with the first life's weights only if nothing was kept.
    """
    source, told = newest(home)
    job = KINDS[kind](1 if not source else 100 + life)
    at, losses, gradients = 0, [], 0
    if source:
        job.load(source)
        at, losses = told["step"], told["losses"]
        torch.set_rng_state(torch.tensor(told["rng"], dtype=torch.uint8))
    share = BATCH // WORLD
    with Vault.at(home).writer(dist.get_rank()) as writer:
        for step in range(at + 1, steps + 1):
            loss = job.step(batch(step)[dist.get_rank() * share :][:share]).detach().double()
            dist.all_reduce(loss)
            losses.append((float(loss) / WORLD).hex())
            rng = torch.get_rng_state().tolist()
            saved = writer.save(step, job.kept, {"step": step, "losses": losses, "rng": rng})
            gradients += bool(saved.replays)
        end = time.monotonic() + SECONDS
        while (writer.committed() or (0, 0))[1] != steps and time.monotonic() < end:
            time.sleep(0.05)
    told = {"digest": digest(job.state()), "losses": losses, "gradients": gradients}
    if dist.get_rank() == 0:
        (result / "trained.json").write_text(json.dumps(told))


def come_back(kind: str, source: str, result: Path, name: str) -> None:
    """The state on other ranks, from memory or from a folder."""
    job = KINDS[kind](7)
    job.load(source)
    told = digest(job.state())
    if dist.get_rank() == 0:
        (result / f"{name}.digest").write_text(told)


# ---- processes -------------------------------------------------------------------------------------------------------------


def forked(act: Callable[[], None], log: Path) -> int:
    pid = os.fork()
    if pid:
        EVERY.add(pid)
        return pid
    os.setpgid(0, 0)
    try:
        with log.open("a") as out:
            os.dup2(out.fileno(), 1)
            os.dup2(out.fileno(), 2)
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def ranks(world: int, act: Callable[[], None], logs: Path) -> list[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def one(rank: int) -> None:
        told = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        os.environ.update(told, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        deepspeed.init_distributed("gloo", verbose=False)
        act()
        dist.barrier()
        os._exit(0)

    return [forked(lambda rank=rank: one(rank), logs / f"rank-{rank}.log") for rank in range(world)]  # type: ignore[misc]


def ended(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    if found:
        EVERY.discard(pid)
    return os.waitstatus_to_exitcode(status) if found else None


def finish(pids: list[int], seconds: float) -> None:
    """Wait until ranks have ended, well."""
    end = time.monotonic() + seconds
    while pids and time.monotonic() < end:
        pids = [pid for pid in pids if not _well(ended(pid))]
        time.sleep(0.01)
    assert not pids, f"no end after {seconds} seconds"


def kill(pid: int) -> None:
    if pid in EVERY:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        EVERY.discard(pid)


class Machines:
    """The servers of a vault, one per domain, and the victims."""

    def __init__(self, home: Path, logs: Path, replays: int) -> None:
        self.home, self.logs = home, logs
        Vault.make(home, ranks=WORLD, domains=WORLD, protect="raim5", replays=replays)
        self.servers: dict[int, int] = {}
        for number in range(WORLD):
            self.serve(number)

    def serve(self, number: int) -> None:
        """Started, and waited for until it has made its domain anew."""
        ready = self.logs / f"served-{number}"
        ready.unlink(missing_ok=True)

        def act() -> None:
            with Server(self.home, number) as server:
                ready.touch()
                while True:
                    with suppress(OSError):  # of a domain that is gone meanwhile
                        server.turn()
                    time.sleep(0.1)

        self.servers[number] = forked(act, self.logs / f"server-{number}.log")
        end = time.monotonic() + SECONDS
        while not ready.exists():
            assert time.monotonic() < end, f"server {number} does not start"
            time.sleep(0.05)

    def strike(self, who: str, number: int, pids: list[int]) -> None:
        if who in ("server", "node"):
            kill(self.servers.pop(number))
        if who in ("rank", "node"):
            kill(pids[number])
        if who == "all":
            for pid in pids:
                kill(pid)
        if who == "node":
            shutil.rmtree(self.home / f"d{number}")
        if who == "server":
            self.serve(number)

    def step(self) -> int:
        newest = Vault.at(self.home).committed()
        return newest.step if newest is not None else 0

    def wait_for(self, step: int, pids: list[int]) -> None:
        """Until a step counts, of ranks that are all alive."""
        end = time.monotonic() + SECONDS
        while self.step() < step:
            assert time.monotonic() < end, f"step {step} does not come to count"
            assert not any(_well(ended(pid)) for pid in pids), "a life ends early"
            time.sleep(0.05)


def lives(job: dict[str, Any], machines: Machines, result: Path) -> tuple[Counter[str], list[int]]:
    """Train with this many kills; returns victims, and committed steps."""
    dice = random.Random(job["seed"])
    struck, life = Counter[str](), 0
    kept: list[int] = []
    while True:
        life += 1
        pids = ranks(WORLD, lambda life=life: train(job["kind"], machines.home, life, job["steps"], result), result)  # type: ignore[misc]
        left = job["kills"] - sum(struck.values())
        if not left:
            finish(pids, SECONDS + 2 * job["steps"])
            return struck, kept
        done = sum(struck.values())
        who = EACH[done] if done < len(EACH) else dice.choices(EACH, (4, 2, 4, 2))[0]
        if dice.random() < 0.8:  # else while it begins, or comes back
            machines.wait_for(machines.step() + dice.randrange(1, AHEAD), pids)
        time.sleep(dice.uniform(0.0, 0.3))
        kept.append(machines.step())
        number = dice.randrange(WORLD)
        machines.strike(who, number, pids)
        struck[who] += 1
        if who == "server":  # training continues for a while
            machines.wait_for(machines.step() + dice.randrange(1, AHEAD), pids)
        for pid in pids:  # as a launcher does, when one of its ranks is gone
            kill(pid)
        if who == "node":
            machines.serve(number)


def _well(status: int | None, good: int = 0) -> bool | None:
    """True: it ended well; False: it lives.

    Raises: AssertionError if it failed.
    """
    assert status in (None, good), f"a rank ended with {status}"
    return status is not None


def main(job: dict[str, Any]) -> dict[str, Any]:
    result = Path(job["folder"])
    result.mkdir(parents=True)
    machines = Machines(result / "memory" / "job", result, job["replays"])
    try:
        struck, kept = lives(job, machines, result)
        trained = json.loads((result / "trained.json").read_text())
        back = {}
        source = f"vault:{machines.home}"
        for name, (kind, world) in job["back"].items():
            pids = ranks(world, lambda kind=kind, name=name: come_back(kind, source, result, name), result)  # type: ignore[misc]
            finish(pids, SECONDS)
            back[name] = (result / f"{name}.digest").read_text()
    finally:
        for pid in tuple(EVERY):
            kill(pid)
    return {**trained, "struck": dict(struck), "kept": kept, "back": back, "home": str(machines.home)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # which the first optimizer of a process asks for
    preload()
    asked = json.loads(Path(sys.argv[1]).read_text())
    try:
        told: dict[str, Any] = main(asked)
    except BaseException:
        told = {"error": traceback.format_exc()[-3000:]}
    Path(asked["folder"], "result.json").write_text(json.dumps(told))
