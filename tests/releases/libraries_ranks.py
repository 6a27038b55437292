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
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import jobs, models

SAVED = 3  # steps
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
        self.model: Any = self.cut(Net())
        spoil = 0.25 * (seed != 7)
        self.optimizer: Any = models.optimizer("adamw", self.groups(spoil))
        self.schedule: Any = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0 / (1 + 0.1 * step))
        self.step = 0

    def cut(self, model: Any) -> Any:
        return model

    def groups(self, spoil: float) -> list[dict[str, Any]]:
        return models.parameter_groups(self.model, 2, spoil)

    def facts(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        names = {p: n.removeprefix("module.") for n, p in self.model.named_parameters()}  # of DDP
        for group in getattr(self.optimizer, "optimizer", self.optimizer).param_groups:
            for p in group["params"]:
                states = getattr(self.optimizer, "optimizer", self.optimizer).state[p]
                kept = {k: whole(v) if torch.is_tensor(v) and v.ndim else float(v) for k, v in states.items()}
                out[names[p]] = {"weight": whole(p.detach()), **kept}
                out[names[p]] |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        return {"params": out, "schedule": {"last_epoch": self.schedule.state_dict()["last_epoch"]}}

    def losses(self, steps: int) -> list[float]:
        out = []
        for step in range(self.step, self.step + steps):
            x, y = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in models.batch(step))
            loss = self.model(x, y)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            total = loss.detach().double().clone()
            dist.all_reduce(total)
            out.append(float(total) / dist.get_world_size())
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


class Recorded(Loop):
    """A loop of a library.

    A loaded run notes its state before its first step, and the losses after it.
    """

    def __init__(self, run: dict[str, Any], seed: int) -> None:
        self.run = run
        super().__init__(run, seed)
        self.noted: dict[str, Any] | None = None
        self.told: list[float] = []

    def facts(self) -> dict[str, Any]:
        return self.noted or super().facts()

    def loss(self, step: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(*models.batch(step))
        self.told.append(float(loss.detach()))
        return loss

    def losses(self, steps: int) -> list[float]:
        """Losses before a save and after a load.

        They are those of a plain loop if a run is not interrupted.
        """
        if self.noted is not None:
            return self.told
        if self.step:
            self.optimizer.zero_grad()  # which Lightning does before a step
            return super().losses(steps)
        self.fit(steps)
        self.step = steps
        return self.told

    def load(self, folder: str) -> None:
        self.fit(SAVED + 2, folder)
        assert self.noted is not None, "it did not train on"

    def fit(self, last: int, folder: str = "") -> None:
        raise NotImplementedError


class Lightning(Recorded):
    """A LightningModule and its `.ckpt`."""

    def fit(self, last: int, folder: str = "") -> None:
        import lightning

        run = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                for name, part in run.model.named_children():
                    setattr(self, name, part)

            def configure_optimizers(self) -> Any:
                return {"optimizer": run.optimizer, "lr_scheduler": {"scheduler": run.schedule, "interval": "step"}}

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(10)), batch_size=1)

            def on_train_start(self) -> None:
                if folder:
                    run.noted = run.facts()

            def training_step(self, batch: Any, index: int) -> torch.Tensor:
                return run.loss(self.trainer.global_step)

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        self.trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=last, max_epochs=-1, enable_checkpointing=False, **quiet
        )
        file = Path(folder, "last.ckpt") if folder and Path(folder).is_dir() else folder
        self.trainer.fit(Module(), ckpt_path=file or None)

    def save(self, folder: str) -> None:
        self.trainer.save_checkpoint(folder)


class Trained(Recorded):
    """A model with transformers' Trainer."""

    def fit(self, last: int, folder: str = "") -> None:
        import transformers

        run = self

        class Note(transformers.TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                if folder and run.noted is None:
                    run.noted = run.facts()

        class Trainer(transformers.Trainer):
            def compute_loss(self, *_: Any, **__: Any) -> torch.Tensor:
                return run.loss(self.state.global_step)

        asked = transformers.TrainingArguments(
            output_dir=f"{run.run['folder']}.runs", per_device_train_batch_size=1, max_steps=last, save_steps=SAVED,
            report_to=[], disable_tqdm=True, use_cpu=True, max_grad_norm=0.0,
        )  # fmt: skip
        rows = [{"x": torch.tensor([n])} for n in range(10)]
        made = Trainer(
            self.model, asked, train_dataset=rows, optimizers=(self.optimizer, self.schedule), callbacks=[Note()]
        )
        made.train(resume_from_checkpoint=folder or None)

    def save(self, folder: str) -> None:
        Path(f"{self.run['folder']}.runs", f"checkpoint-{SAVED}").rename(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def verbs(kinds: dict[str, Any], key: str) -> dict[str, Any]:
    """The jobs of runs whose `key` names the kind."""

    def train(job: dict[str, Any]) -> dict[str, Any]:
        made = kinds[job["run"][key]]({**job["run"], "folder": job["folder"]}, 7)
        before = made.losses(job["steps"])
        made.save(job["folder"])
        facts = made.facts()
        if dist.get_rank() == 0:
            torch.save(facts, job["truth"])
        return {"before": before, "after": made.losses(2)}

    def load(job: dict[str, Any]) -> dict[str, Any]:
        made = kinds[job["run"][key]]({**job["run"], "folder": job["folder"]}, 99)
        made.load(job["folder"])
        found = jobs.differences(made.facts(), torch.load(job["truth"], weights_only=False))
        return {"differences": found, "after": made.losses(2)}

    return {"train": train, "load": load}


KINDS = {"transformers": Folder, "accelerate": Accelerated, "lightning": Lightning, "trainer": Trained}

if __name__ == "__main__":
    torch.set_num_threads(1)
    jobs.do_all(verbs(KINDS, "library"))
