"""Runs of a loop under one strategy, on two gloo ranks.

A job's `do` is trainer or accelerate, its `strategy` ddp, full, sharded or zero, with 16 at its end in bf16.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}

import torch
import torch.distributed as dist
import transformers
from accelerate import Accelerator, DeepSpeedPlugin, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop.jobs import do_all

WORDS, LENGTH, BATCH, SAVED, STEPS = 31, 7, 8, 3, 6
ZERO = ("zero", "zero16")
KINDS = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}


def model(*, tied: bool) -> Any:
    """A model whose class states the order of its parameters."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=10, n_embd=12, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0, use_cache=False, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def as_if_accelerated() -> None:
    """Let Accelerate take these ranks for accelerators, which FSDP needs."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def mean(loss: torch.Tensor) -> float:
    total = loss.detach().double().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


# ---- the Trainer -----------------------------------------------------------------------------------------------------


class Data(torch.utils.data.Dataset[Any]):
    tokens = torch.randint(WORDS, (4 * BATCH, LENGTH), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Trainer(transformers.Trainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        self.losses.append(mean(loss))
        return loss


def trainer(strategy: str, folder: str, resume: str) -> list[float]:
    more: dict[str, Any] = {}
    if strategy in KINDS:
        more["fsdp"] = "full_shard auto_wrap"
        wrapped = {"transformer_layer_cls_to_wrap": ["GPT2Block"], "state_dict_type": KINDS[strategy]}
        more["fsdp_config"] = {"version": 2, "fsdp_version": 2, **wrapped}
    elif strategy in ZERO:
        more["deepspeed"] = {
            "bf16": {"enabled": "auto"}, "train_batch_size": "auto",
            "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False, "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "steps_per_print": 1_000_000,
        }  # fmt: skip
    asked = transformers.TrainingArguments(
        output_dir=f"{folder}.runs", per_device_train_batch_size=BATCH // 2, max_steps=STEPS, save_steps=SAVED,
        logging_steps=1, learning_rate=4e-2, weight_decay=0.1, warmup_steps=2, seed=7, data_seed=5, report_to="none",
        disable_tqdm=True, use_cpu=True, ddp_backend=None if strategy in ZERO else "gloo",
        bf16=strategy.endswith("16"), **more,
    )  # fmt: skip
    if strategy in KINDS:
        _ = asked.device
        as_if_accelerated()
    transformers.set_seed(99 if resume else 7)
    made = Trainer(model=model(tied=True), args=asked, train_dataset=Data())
    made.train(resume_from_checkpoint=resume or None)
    if not resume and dist.get_rank() == 0:
        Path(f"{folder}.runs", f"checkpoint-{SAVED}").rename(folder)
    return made.losses if resume else made.losses[SAVED:]


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerate(strategy: str, folder: str, resume: str) -> list[float]:
    plugins: dict[str, Any] = {}
    if strategy in KINDS:
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        plugins["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=KINDS[strategy], auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"], cpu_ram_efficient_loading=False,
        )  # fmt: skip
        as_if_accelerated()
    elif strategy in ZERO:
        plugins["deepspeed_plugin"] = DeepSpeedPlugin(
            {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True,
             "zero_force_ds_cpu_optimizer": False, "train_micro_batch_size_per_gpu": BATCH // 2,
             "gradient_accumulation_steps": 1, "steps_per_print": 1_000_000}
        )  # fmt: skip
    low = "bf16" if strategy.endswith("16") else "no"
    one = Accelerator(cpu=strategy not in ZERO, mixed_precision=low, **plugins)
    transformers.set_seed(99 if resume else 7)
    net = model(tied=False)
    wide, flat = ([p for p in net.parameters() if (p.ndim > 1) == is_wide] for is_wide in (True, False))
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": flat, "weight_decay": 0.0, "lr": 1e-2}]
    chosen = torch.optim.AdamW(groups, lr=4e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, lambda step: 1 / (1 + step))
    names = {p: name for name, p in net.named_parameters()}
    if one.is_main_process:  # for those who convert: Accelerate's folder has no class
        Path(f"{folder}.names.json").write_text(
            json.dumps([[names[p] for p in g["params"]] for g in chosen.param_groups])
        )
    net, chosen, schedule = one.prepare(net, chosen, schedule)
    first = 0
    if resume:
        one.load_state(resume)
        first = SAVED
    losses = []
    for step in range(first, STEPS):
        share = Data.tokens[step * BATCH % len(Data.tokens) :][one.process_index * BATCH // 2 :][: BATCH // 2]
        loss = net(input_ids=share, labels=share).loss
        one.backward(loss)
        chosen.step()
        schedule.step()
        chosen.zero_grad()
        losses.append(mean(loss))
        if not resume and step == SAVED - 1:
            one.save_state(folder)
    return losses[SAVED - first :]


def run(loop: Callable[[str, str, str], list[float]], job: dict[str, Any]) -> dict[str, Any]:
    """The losses of the steps after the saved one."""
    if job["strategy"] in ZERO:
        PartialState(cpu=True)
    else:
        os.environ["ACCELERATE_USE_CPU"] = "true"
    return {"losses": loop(job["strategy"], job["folder"], job["folder"] if job["resume"] else "")}


if __name__ == "__main__":
    do = {of.__name__: partial(run, of) for of in (trainer, accelerate)}
    do_all(do, lambda: None)  # the loops begin their process groups
