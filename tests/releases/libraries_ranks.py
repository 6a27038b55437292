"""One release of transformers or Accelerate, on one rank.

It saves, loads, compares and trains:

`python libraries_ranks.py JOBS`.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import jobs, models

SIZES = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 10, "num_hidden_layers": 2, "num_attention_heads": 2}


class Folder:
    """A model of transformers and its folder, without an optimizer."""

    def __init__(self, run: dict[str, Any], seed: int) -> None:
        import transformers

        torch.manual_seed(seed)
        kind = run["class"]
        more = {"num_local_experts": 2} if kind == "Mixtral" else {}
        config = getattr(transformers, f"{kind}Config")(
            **SIZES, num_key_value_heads=1, max_position_embeddings=16, **more
        )
        self.kind, self.run = getattr(transformers, f"{kind}ForCausalLM"), run
        self.model = self.kind(config)

    def save(self, folder: str) -> None:
        known = inspect.signature(self.model.save_pretrained).parameters
        form = {"safe_serialization": self.run["safe"]} if "safe_serialization" in known else {}
        self.model.save_pretrained(folder, max_shard_size="8KB", **form)
        if not self.run["safe"]:
            assert [*Path(folder).glob("*.bin")], "it writes safetensors alone"

    def load(self, folder: str) -> None:
        self.model = self.kind.from_pretrained(folder)

    def facts(self) -> dict[str, Any]:
        return {name: {"weight": value.clone()} for name, value in self.model.state_dict().items()}

    def losses(self, steps: int) -> list[float]:
        chosen, out = torch.optim.SGD(self.model.parameters(), lr=0.1), []
        for step in range(steps):
            x, _ = models.batch(step)
            loss = self.model(input_ids=x, labels=x).loss
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            out.append(float(loss))
        return out


class Net(torch.nn.Module):
    """A model with five parameters of five shapes.

    Their order in an optimizer is plain, therefore.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 13)
        self.down = torch.nn.Linear(13, 11)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.down(torch.nn.functional.silu(self.up(self.embed(x))))
        return torch.nn.functional.cross_entropy(logits.reshape(-1, 11), y.reshape(-1))


class Loop:
    """A model, AdamW and a schedule in torch, which the others take."""

    def __init__(self, run: dict[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = Net()
        spoil = 0.25 * (seed != 7)
        self.optimizer: Any = models.optimizer("adamw", models.parameter_groups(self.model, 2, spoil))
        self.schedule: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + 0.1 * step))
        self.step = 0

    def facts(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        names = {p: n for n, p in self.model.named_parameters()}
        for group in getattr(self.optimizer, "optimizer", self.optimizer).param_groups:
            for p in group["params"]:
                states = getattr(self.optimizer, "optimizer", self.optimizer).state[p]
                kept = {k: v.clone() if torch.is_tensor(v) and v.ndim else float(v) for k, v in states.items()}
                out[names[p]] = {"weight": p.detach().clone(), **kept}
                out[names[p]] |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        return {**out, "schedule": {"last_epoch": self.schedule.state_dict()["last_epoch"]}}

    def losses(self, steps: int) -> list[float]:
        out = []
        for step in range(self.step, self.step + steps):
            x, y = models.batch(step)
            loss = self.model(x, y)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            out.append(float(loss))
        self.step += steps
        return out


class Accelerated(Loop):
    """The loop with Accelerate."""

    def __init__(self, run: dict[str, Any], seed: int) -> None:
        from accelerate import Accelerator

        super().__init__(run, seed)
        self.accelerator = Accelerator(cpu=True)
        parts = self.accelerator.prepare(self.model, self.optimizer, self.schedule)
        self.model, self.optimizer, self.schedule = parts

    def save(self, folder: str) -> None:
        self.accelerator.save_state(folder)

    def load(self, folder: str) -> None:
        self.accelerator.load_state(folder)
        self.step = self.schedule.state_dict()["last_epoch"]


DO = {"transformers": Folder, "accelerate": Accelerated}


def train(job: dict[str, Any]) -> dict[str, Any]:
    made: Any = DO[job["run"]["library"]](job["run"], 7)
    before = made.losses(job["steps"])
    made.save(job["folder"])
    torch.save(made.facts(), job["truth"])
    return {"before": before, "after": made.losses(2)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    made: Any = DO[job["run"]["library"]](job["run"], 99)
    made.load(job["folder"])
    found = jobs.differences(made.facts(), torch.load(job["truth"], weights_only=False))
    return {"differences": found, "after": made.losses(2)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs.do_all({"train": train, "load": load})
