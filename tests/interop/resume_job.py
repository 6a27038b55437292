"""Training scripts that resume by `ucpl.resume`, for ranks: `python resume_job.py JOBS`.

Each loop is a script as people write it: all of its ranks ask for the path at once, load it, train on, and save in the
middle. A job may be killed, in a step or in the middle of a save.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch
from torch.distributed.checkpoint import filesystem, state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.stateful import Stateful

sys.path.insert(0, str(Path(__file__).parents[2]))
import ucpl
from tests.interop import dcp_job, deepspeed_job, parallel_job

SAVED, STEPS = 2, 4
PIPELINE = {"pp": 2, "method": "uniform", "dtype": "fp32", "optimizer": "adamw"}


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def spoil_of(path: str | None) -> dict[str, Any]:
    """Other numbers in a loop that must load them."""
    return {"seed": 99, "spoil": 0.25} if path else {"seed": 7, "spoil": 0.0}


def dcp(folder: Path, path: str | None, dies: bool) -> list[float]:
    """FSDP2 with DCP, killed in the middle of the second save."""
    run = dcp_job.Run({"model": "cut"}, **spoil_of(path))
    first = 0
    if path:
        run.load(path, SAVED)
        first = run.schedule.last_epoch
    losses = run.losses(first, SAVED - first) if first < SAVED else []
    if not path:
        run.save(str(folder / f"step_{SAVED}"))
    losses += run.losses(SAVED, 1)
    if dies:
        filesystem.FileSystemWriter.finish = killed  # type: ignore[method-assign]
        run.save(str(folder / f"step_{SAVED + 1}"))
    return losses + run.losses(SAVED + 1, STEPS - SAVED - 1)


class Model(Stateful):
    """torchtitan's ModelWrapper: names of the model without a prefix."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def state_dict(self) -> dict[str, Any]:
        return state_dict.get_model_state_dict(self.module)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state_dict.set_model_state_dict(self.module, state, options=state_dict.StateDictOptions(strict=False))


class Optimizers(Stateful):
    """torchtitan's OptimizersContainer: flat names of states and groups."""

    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def state_dict(self) -> dict[str, Any]:
        return state_dict.get_optimizer_state_dict(self.module, self.optimizer, options=self.options)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state_dict.set_optimizer_state_dict(self.module, self.optimizer, state, options=self.options)


class Progress(Stateful):
    """torchtitan's Trainer: the step."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def titan(folder: Path, path: str | None, dies: bool) -> list[float]:
    """FSDP2 with the containers and folders of torchtitan."""
    run = dcp_job.Run({"model": "cut"}, **spoil_of(path))
    progress = Progress()
    parts = {"optimizer": Optimizers(run.module, run.optimizer), "lr_scheduler": run.schedule, "train_state": progress}
    model = Model(run.module)
    if path:
        names = model.state_dict()
        states = {**names, **parts}
        load(states, checkpoint_id=path)
        model.load_state_dict({name: states[name] for name in names})
    losses = []
    while progress.step < STEPS:
        losses += run.losses(progress.step, 1)
        progress.step += 1
        if progress.step == SAVED:
            save({**model.state_dict(), **parts}, checkpoint_id=str(folder / "checkpoint" / f"step-{SAVED}"))
        if dies and progress.step > SAVED:
            killed()
    return losses


def deepspeed(folder: Path, path: str | None, dies: bool) -> list[float]:
    """An engine of DeepSpeed with a pipeline of two stages."""
    engine = parallel_job.engine_of(PIPELINE, **spoil_of(path))
    first = 0
    if path:
        engine.load_checkpoint(path)
        first = engine.global_steps
    losses = parallel_job.losses(engine, PIPELINE, first, SAVED - first) if first < SAVED else []
    if not path:
        engine.save_checkpoint(str(folder))
    losses += parallel_job.losses(engine, PIPELINE, SAVED, 1)
    if dies:
        killed()
    return losses + parallel_job.losses(engine, PIPELINE, SAVED + 1, STEPS - SAVED - 1)


def accelerate(folder: Path, path: str | None, dies: bool) -> list[float]:
    """Accelerate with ZeRO-1."""
    from tests.interop import accelerate_job  # transformers is imported for the loops that need it

    loop = accelerate_job.Loop({"model": "gpt2", "stage": 1}, **spoil_of(path))
    first = 0
    if path:
        loop.accelerator.load_state(path)
        first = len(loop.seen.losses)
    losses = loop.losses(first, SAVED) if first < SAVED else []
    if not path:
        loop.accelerator.save_state(str(folder / "checkpoints" / "checkpoint_0"))
    losses += loop.losses(SAVED, SAVED + 1)
    if dies:
        killed()
    return losses + loop.losses(SAVED + 1, STEPS)


def trainer(folder: Path, path: str | None, dies: bool) -> list[float]:
    """The Trainer with ZeRO-2, and with the callback that verifies each save."""
    import transformers

    from tests.interop import trainer_job
    from ucpl.integrations.transformers import UcplCallback

    class Mortal(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if dies and state.global_step > trainer_job.SAVED:
                killed()

    run = {"model": "gpt2", "stage": 2, "dtype": "fp32"}
    made = trainer_job.trainer_of(run, str(folder), spoil=bool(path))
    made.add_callback(Mortal())
    made.add_callback(UcplCallback())
    made.train(resume_from_checkpoint=path)
    return made.told


LOOPS: dict[str, Callable[[Path, str | None, bool], list[float]]] = {
    loop.__name__: loop for loop in (dcp, titan, deepspeed, accelerate, trainer)
}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Resume, train to the end, or die."""
    path = ucpl.resume(job["folder"])
    assert path == ucpl.resume(job["folder"])
    return {"path": path, "losses": LOOPS[job["loop"]](Path(job["folder"]), path, job["dies"])}


def begin() -> None:
    """The process group, as the frameworks of these loops want it."""
    if "accelerate" in sys.modules:
        from accelerate import PartialState

        PartialState(cpu=True)
    else:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


if __name__ == "__main__":
    if '"trainer"' in Path(sys.argv[1]).read_text():  # before the ranks are forked
        for name in ("tests.interop.accelerate_job", "ucpl.integrations.transformers"):
            import_module(name)
    deepspeed_job.main({"run": run}, begin=begin)
