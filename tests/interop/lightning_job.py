"""Lightning's Trainer and Fabric with DeepSpeedStrategy, for ranks: `python lightning_job.py JOBS`.

One process group does all jobs of a world size in turn. `train` saves by `ModelCheckpoint`, or by `fabric.save`, in the
middle and continues; `load` resumes by `fit(ckpt_path=...)`, or by `fabric.load`, in a module of other numbers, and
reports differences.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.strategies import DeepSpeedStrategy as StrategyOfFabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import deepspeed_job, models

SAVED, STEPS = 2, 4


class OnCPU(DeepSpeedStrategy):
    """Lightning's strategy without its check for CUDA, which DeepSpeed does not need."""

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


class FabricOnCPU(StrategyOfFabric):
    """Fabric's strategy without its check for CUDA and devices."""

    def setup_environment(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu", 0)


def made(run: dict[str, Any], spoil: float) -> Any:
    """A model; `spoil` scrambles all values that a load must restore."""
    net = models.MODELS[run["model"]](False)
    if spoil:
        with torch.no_grad():
            for tensor in (*net.parameters(), *net.buffers()):
                tensor.copy_(torch.randn_like(tensor))
        for name, buffer in net.named_buffers():
            if name == "scale":  # not persistent: no checkpoint has it
                buffer.fill_(0.5)
    return net


def scheduled(net: torch.nn.Module, spoil: float) -> tuple[Any, Any]:
    """An optimizer and its schedule."""
    chosen = models.optimizer("adamw", models.parameter_groups(net, 2, spoil))
    return chosen, torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1.0 / (1 + 0.1 * step))


def mine(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's share of a step's data."""
    share = models.BATCH // dist.get_world_size()
    part = slice(dist.get_rank() * share, (dist.get_rank() + 1) * share)
    x, y = models.batch(step)
    return x[part], y[part]


def mean(loss: torch.Tensor) -> float:
    """Of all ranks."""
    total = loss.detach().double()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def config(run: dict[str, Any]) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": run["stage"], "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": models.BATCH // dist.get_world_size(),
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
    }


class Module(lightning.LightningModule):
    """A model as a LightningModule.

    It keeps its losses, and the engine's state after SAVED steps.
    """

    def __init__(self, run: dict[str, Any], spoil: float) -> None:
        super().__init__()
        self.save_hyperparameters({"width": 6, "note": ("kept", 1)})
        self.net = made(run, spoil)
        self.spoil = spoil
        self.losses: list[float] = []
        self.counted = 0
        self.state: Any = None

    def configure_optimizers(self) -> Any:
        chosen, schedule = scheduled(self.net, self.spoil)
        return {"optimizer": chosen, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def train_dataloader(self) -> Any:
        """As many batches as steps.

        Lightning begins a loader anew in the middle of an epoch, so data follow the step.
        """
        data = torch.utils.data.TensorDataset(torch.arange(STEPS * dist.get_world_size()))
        return torch.utils.data.DataLoader(data, batch_size=1)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(*mine(self.trainer.global_step))
        self.losses.append(mean(loss))
        return loss

    def on_train_start(self) -> None:
        if self.trainer.global_step == SAVED:
            self.keep()

    def on_train_batch_end(self, *given: Any) -> None:
        if self.trainer.global_step == SAVED:
            self.keep()

    def keep(self) -> None:
        if self.state is None:
            self.state = {
                "params": deepspeed_job.whole_state(self.trainer.strategy.deepspeed_engine),
                "buffers": {name: buffer.clone() for name, buffer in self.net.named_buffers()},
                "schedule": self.trainer.lr_scheduler_configs[0].scheduler.state_dict(),
                "counted": self.counted,
            }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["counted"] = self.trainer.global_step * 10

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.counted = checkpoint["counted"]


def fitted(job: dict[str, Any], module: Module, callbacks: list[Any], path: str | None) -> None:
    trainer = lightning.Trainer(
        strategy=OnCPU(config=config(job["run"])), accelerator="cpu", devices=dist.get_world_size(),
        max_epochs=1, callbacks=callbacks, logger=False, enable_checkpointing=bool(callbacks), enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(Path(job["result"]).parent),
    )  # fmt: skip
    trainer.fit(module, ckpt_path=path, weights_only=False)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train to the end, with a folder of the step SAVED."""
    torch.manual_seed(7)
    if job["run"].get("fabric"):
        return train_by_fabric(job)
    module = Module(job["run"], 0.0)
    folder = Path(job["folder"])
    saving = ModelCheckpoint(
        dirpath=folder.parent, filename=folder.stem, every_n_train_steps=SAVED, save_top_k=1, monitor="step", mode="min"
    )
    fitted(job, module, [saving], None)
    if dist.get_rank() == 0:
        torch.save({**module.state, "counted": SAVED * 10}, job["truth"])
    return {"before": module.losses[:SAVED], "after": module.losses[SAVED:]}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Resume from a folder, in a module of other numbers."""
    torch.manual_seed(99)
    if job["run"].get("fabric"):
        return load_by_fabric(job)
    module = Module(job["run"], 0.25)
    fitted(job, module, [], job["folder"])
    truth = torch.load(job["truth"], weights_only=False)
    return {"differences": deepspeed_job.differences(module.state, truth), "after": module.losses}


class Loop:
    """A typical loop with Fabric, and all values that it saves."""

    def __init__(self, run: dict[str, Any], spoil: float) -> None:
        net = made(run, spoil)
        chosen, self.schedule = scheduled(net, spoil)
        world = dist.get_world_size()
        self.fabric = lightning.Fabric(accelerator="cpu", devices=world, strategy=FabricOnCPU(config=config(run)))
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(net, chosen)
        self.state = {
            "model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "step": 0, "losses": [],
        }  # fmt: skip

    def losses(self, last: int) -> list[float]:
        """The steps from the loop's position to `last` - 1."""
        out = []
        for step in range(self.state["step"], last):
            loss = self.model(*mine(step))
            self.fabric.backward(loss, model=self.model)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            out.append(mean(loss))
            self.state["step"] = step + 1
        self.state["losses"] = [*self.state["losses"], *out]
        return out

    def facts(self) -> dict[str, Any]:
        engine = self.fabric.strategy.model
        return {
            "params": deepspeed_job.whole_state(engine),
            "buffers": {name: buffer.clone() for name, buffer in engine.module.named_buffers()},
            "schedule": self.schedule.state_dict(),
            "step": self.state["step"],
            "losses": self.state["losses"],
        }


def train_by_fabric(job: dict[str, Any]) -> dict[str, Any]:
    loop = Loop(job["run"], 0.0)
    before = loop.losses(SAVED)
    loop.fabric.save(job["folder"], loop.state)
    truth = loop.facts()
    if dist.get_rank() == 0:
        torch.save(truth, job["truth"])
    return {"before": before, "after": loop.losses(STEPS)}


def load_by_fabric(job: dict[str, Any]) -> dict[str, Any]:
    loop = Loop(job["run"], 0.25)
    loop.fabric.load(job["folder"], loop.state)
    found = deepspeed_job.differences(loop.facts(), torch.load(job["truth"], weights_only=False))
    return {"differences": found, "after": loop.losses(STEPS)}


if __name__ == "__main__":
    deepspeed_job.main({"train": train, "load": load})
