"""The state of a small job at any step on its ranks.

torch writes it, `convert` cuts it, and the ranks have it by the layout's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import ucpl
from ucpl.conversion.planning import Asked, described
from ucpl.conversion.requests import Given
from ucpl.extents import key_text
from ucpl.placement import locate
from ucpl.vault import Vault, Writer
from ucpl.vault.server import Server

ROOT = Path(__file__).parents[2]
JOB = ROOT / "examples/ranks/job.ucpl"
WIDE, LAYERS = 24, 5


def whole(top: Path, step: int) -> Path:
    """The state of a step on one rank.

    It has weights of random bits, masters and moments.
    """
    numbers = torch.Generator().manual_seed(step)
    shapes: dict[str, tuple[int, ...]] = {"embed": (61, WIDE)}
    inner = {
        "norm1": (WIDE,), "qkv": (3 * WIDE, WIDE), "out": (WIDE, WIDE), "norm2": (WIDE,), "up": (42, WIDE),
        "down": (WIDE, 42),
    }  # fmt: skip
    shapes |= {f"layer {i}/{name}": shape for i in range(LAYERS) for name, shape in inner.items()} | {"norm": (WIDE,)}
    values = {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}
    weights: dict[str, object] = {}
    for name, value in values.items():
        *steps, last = name.split("/")
        there = weights
        for one in steps:
            there = there.setdefault(one, {})  # type: ignore[assignment]
        there[last] = value.bfloat16()
    flat = torch.cat([v.reshape(-1) for v in values.values()])
    flat = torch.cat([flat, torch.zeros(len(flat) % 2)])
    top.mkdir(parents=True)
    torch.save(weights, top / "weights_0_0.pt")
    torch.save({"fp32": flat, "exp_avg": flat * 2, "exp_avg_sq": flat * flat}, top / "optimizer_0_0_0.pt")
    return top


def call(degrees: str) -> str:
    return f"{JOB}:job({degrees})"


class Truth:
    """Each step's state, unsharded and by the ranks of a layout."""

    def __init__(self, top: Path, degrees: str, steps: Iterable[int]) -> None:
        self.layout = call(degrees)
        self.folders = {step: whole(top / f"whole-{step}", step) for step in steps}
        self.cut: dict[int, list[dict[str, torch.Tensor]]] = {}
        _, there, _ = described(Asked(call(""), self.layout), Given())
        for step, folder in self.folders.items():
            ucpl.convert(folder, top / f"cut-{step}", to=self.layout, layout=call(""))
            self.cut[step] = [self._of(top / f"cut-{step}", there.layout, r) for r in range(there.layout.ranks)]

    @staticmethod
    def _of(folder: Path, layout: object, rank: int) -> dict[str, torch.Tensor]:
        found = {}
        for home in (h for part in locate(layout, rank=rank).parts for h in part.homes):  # type: ignore[arg-type]
            value = torch.load(folder / home.file, weights_only=True)
            for one in home.key:
                value = value[one]
            found[key_text(home.key)] = value
        return found

    def step_of(self, found: str | Path) -> int:
        """The step whose state a checkpoint has, bit for bit.

        Raises: AssertionError, if there is none.
        """
        for step, folder in self.folders.items():
            if ucpl.compare(folder, found, a_layout=call("")):
                return step
        raise AssertionError(f"{found} is the state of no step")


class Memory:
    """A vault with its writers and servers, all in this process."""

    def __init__(self, vault: Vault, writers: list[Writer], servers: list[Server]) -> None:
        self.vault, self.writers, self.servers = vault, writers, servers
        self.url = f"vault:{vault.home}"

    def save(self, truth: Truth, step: int) -> list[bool]:
        return [bool(w.save(step, truth.cut[step][w.rank], {"at": step})) for w in self.writers]

    def turn(self, times: int = 2) -> None:
        for _ in range(times):
            for server in self.servers:
                server.turn()


@contextmanager
def memory(home: Path, truth: Truth, *, domains: int, protect: str, run: str = "first") -> Iterator[Memory]:
    ranks = len(next(iter(truth.cut.values())))
    with ExitStack() as ends:
        vault = Vault.make(home, ranks=ranks, domains=domains, protect=protect)
        said = {"layout": truth.layout, "run": run, "wait": 0.0, "strict": True}
        writers = [ends.enter_context(vault.writer(r, **said)) for r in range(ranks)]  # type: ignore[arg-type]
        servers = [ends.enter_context(Server(vault.home, d)) for d in range(domains)]
        yield Memory(vault, writers, servers)
