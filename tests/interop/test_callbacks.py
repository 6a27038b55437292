"""Callbacks verify each save in the Trainers of transformers and Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ucpl

pytestmark = pytest.mark.interop


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The saves that the callbacks verify."""
    from ucpl import integrations

    out: list[Path] = []

    def verified(path: Path, **how: Any) -> Any:
        out.append(Path(path))
        return ucpl.verify(path, **how)

    monkeypatch.setattr(integrations, "verify", verified)
    return out


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# ---- transformers ----------------------------------------------------------------------------------------------------


def of_transformers(folder: Path, damaged: int = 0, **how: Any) -> list[float]:
    """Train with the lines of the cookbook.

    damaged: the step that a disk spoils.
    """
    import transformers

    from tests.interop.strategies_job import Data, model
    from ucpl.integrations.transformers import UcplCallback

    class Disk(transformers.TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == damaged:
                flip(folder / f"checkpoint-{damaged}" / "optimizer.pt")

    args = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, max_steps=4, save_steps=2, logging_steps=1, seed=7,
        report_to="none", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    transformers.set_seed(7)
    trainer = transformers.Trainer(model=model(tied=True), args=args, train_dataset=Data(), callbacks=[Disk()])
    trainer.add_callback(UcplCallback(**how))
    trainer.train(resume_from_checkpoint=ucpl.resume(args.output_dir, ranks=1))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


# ---- Lightning -------------------------------------------------------------------------------------------------------


def of_lightning(folder: Path, damaged: int = 0, **how: Any) -> list[float]:
    import lightning
    import torch
    from lightning.fabric.plugins.io import TorchCheckpointIO
    from lightning.pytorch.callbacks import ModelCheckpoint

    from ucpl.integrations.lightning import UcplCallback

    class Disk(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            if checkpoint["global_step"] == damaged:
                flip(Path(path))

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(6, 6)
            self.losses: list[float] = []

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

        def training_step(self, batch: Any, index: int) -> Any:
            step = self.trainer.global_step
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
            loss = (self.net(x) - x.flip(1)).square().mean()
            self.losses.append(loss.item())
            return loss

    torch.manual_seed(7)
    module = Module()
    saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = lightning.Trainer(
        max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        plugins=[Disk()], callbacks=[saves, UcplCallback(**how)],
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(4)), num_workers=0)
    trainer.fit(module, data, ckpt_path=ucpl.resume(folder, ranks=1))
    return module.losses


LOOPS = {"transformers": of_transformers, "lightning": of_lightning}
SAVES = {"transformers": ["checkpoint-2", "checkpoint-4"], "lightning": ["step=2.ckpt", "step=4.ckpt"]}


@pytest.fixture(params=LOOPS)
def loop(request: pytest.FixtureRequest) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield request.param


def test_each_save_is_verified_and_a_restart_resumes(loop: str, seen: list[Path], tmp_path: Path) -> None:
    losses = LOOPS[loop](tmp_path / "out")
    assert [path.name for path in seen] == SAVES[loop] and len(set(losses)) == 4
    if loop == "transformers":
        import shutil

        shutil.rmtree(tmp_path / "out" / "checkpoint-4")
    else:
        (tmp_path / "out" / "step=4.ckpt").unlink()
    assert LOOPS[loop](tmp_path / "out")[-2:] == losses[2:]


def test_a_damaged_save_stops_the_job(loop: str, seen: list[Path], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"is damaged: E\d+: .*`ucpl verify .*` lists"):
        LOOPS[loop](tmp_path / "out", damaged=2)
    assert [path.name for path in seen] == SAVES[loop][:1]


def test_a_damaged_save_only_warns_if_asked(loop: str, seen: list[Path], tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="is damaged"):
        losses = LOOPS[loop](tmp_path / "out", damaged=2, stop=False)
    assert len(losses) == 4 and [path.name for path in seen] == SAVES[loop]
