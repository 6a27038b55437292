"""Lightning's Trainer and transformers load files that went through another form."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ucpl

pytestmark = pytest.mark.interop

SAVED, STEPS = 2, 5
CKPT = (
    'torch_file(file="last.ckpt", model="state_dict", optimizer="optimizer_states/0", scheduler="lr_schedulers", '
    'wrap="net.")'
)


def fitted(folder: Path, saved: Path | None = None) -> list[float]:
    """The losses of a LightningModule after the saved step.

    Without `saved`, the run saves a file.
    """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential()
            self.net.up, self.net.norm, self.net.down = (
                torch.nn.Linear(5, 7),
                torch.nn.LayerNorm(7),
                torch.nn.Linear(7, 3),
            )
            self.losses: list[float] = []

        def configure_optimizers(self) -> object:
            wide, flat = ([p for p in self.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
            chosen = torch.optim.AdamW([{"params": wide, "weight_decay": 0.1}, {"params": flat, "lr": 0.02}], lr=0.05)
            schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1 / (1 + step))
            return {"optimizer": chosen, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

        def train_dataloader(self) -> object:
            return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(STEPS)), batch_size=1)

        def training_step(self, batch: object, index: int) -> torch.Tensor:
            step = self.trainer.global_step
            loss: torch.Tensor = self.net(torch.linspace(-1, 1, 20).view(4, 5) * (1 + step)).square().mean()
            self.losses.append(float(loss.detach()))
            if step == SAVED and saved is None:
                self.trainer.save_checkpoint(folder / "run.ckpt")
            return loss

    lightning.seed_everything(99 if saved else 7, verbose=False)
    module = Module()
    loop = lightning.Trainer(
        accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
    )  # fmt: skip
    loop.fit(module, ckpt_path=saved, weights_only=False)
    return module.losses if saved else module.losses[SAVED:]


@pytest.mark.parametrize("via", ["zero2(dp=2)", "dcp(fsdp=2)", "plain()"])
def test_lightning_resumes_from_a_ckpt_that_was_another_form(via: str, tmp_path: Path) -> None:
    losses = fitted(tmp_path)
    ucpl.convert(tmp_path / "run.ckpt", tmp_path / "via", via)
    ucpl.convert(tmp_path / "via", tmp_path / "made", CKPT)
    assert fitted(tmp_path, tmp_path / "made" / "last.ckpt") == losses
    assert len(losses) == len(set(losses)) == STEPS - SAVED


def test_transformers_loads_a_pytorch_model_bin(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    config = transformers.GPT2Config(vocab_size=31, n_positions=8, n_embd=12, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    torch.save({"model": model.state_dict(), "step": 3}, tmp_path / "run.pt")
    ucpl.convert(tmp_path / "run.pt", tmp_path / "t", 'torch_file(file="pytorch_model.bin", model="", wrap="")')
    config.save_pretrained(tmp_path / "t")
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "t")
    assert all(torch.equal(one, found.state_dict()[name]) for name, one in model.state_dict().items())
