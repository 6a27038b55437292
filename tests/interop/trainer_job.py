"""transformers' Trainer with DeepSpeed, for ranks: `python trainer_job.py JOBS`.

One process group does all jobs of a world size in turn. A job `train` trains to the end and saves on the way; a job
`load` resumes from a folder, in a model of other numbers, and reports differences of the engine from the saved state,
and every loss.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.interop import deepspeed_job, deepspeed_tp_job

BATCH, SAVED, STEPS = 12, 3, 6  # sequences of all ranks a step; the step that is saved; all steps
WORDS, LENGTH = 61, 9


def gpt2(dropout: float) -> transformers.PreTrainedModel:
    """Tied embeddings, fused q, k and v."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=16, n_embd=20, n_layer=2, n_head=2, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


def llama(dropout: float) -> transformers.PreTrainedModel:
    """Untied, grouped key-value heads."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS, hidden_size=24, intermediate_size=36, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=16, attention_dropout=dropout, use_cache=False,
        )
    )  # fmt: skip


def smallest(dropout: float) -> transformers.PreTrainedModel:
    """Of tests/fixtures/trainer: little more than the folder itself."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=WORDS, n_positions=10, n_embd=3, n_layer=1, n_head=1, resid_pdrop=dropout, embd_pdrop=dropout,
            attn_pdrop=dropout, bos_token_id=0, eos_token_id=0, use_cache=False,
        )
    )  # fmt: skip


MODELS = {"gpt2": gpt2, "llama": llama, "smallest": smallest}


def config(run: dict[str, Any]) -> dict[str, Any]:
    """A configuration as people give it to the Trainer."""
    out: dict[str, Any] = {
        "zero_optimization": {
            "stage": run["stage"],
            "reduce_bucket_size": 500_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "steps_per_print": 1_000_000,
    }
    if run.get("tp", 1) > 1:
        out["tensor_parallel"] = {"autotp_size": run["tp"]}
    if run.get("universal"):
        out["checkpoint"] = {"load_universal": True}
    if run.get("schedule"):  # DeepSpeed's own, which the engine keeps
        out["scheduler"] = {
            "type": "WarmupDecayLR",
            "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"},
        }  # fmt: skip
    return out


def arguments(run: dict[str, Any], folder: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH // (dist.get_world_size() // run.get("tp", 1)),
        max_steps=STEPS,
        save_steps=SAVED,
        save_total_limit=None,
        logging_steps=1,
        learning_rate=5e-3,
        weight_decay=0.1,
        warmup_steps=2,
        seed=7,
        data_seed=5,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        bf16=run.get("dtype") == "bf16",
        deepspeed=config(run),
    )


class Data(torch.utils.data.Dataset):
    def __init__(self) -> None:
        made = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(WORDS, (4 * BATCH, LENGTH), generator=made)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Trainer(transformers.Trainer):
    """Keeps the loss of each step, as all ranks have it together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.told: list[float] = []

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(*args, **kwargs)
        total = loss.detach().double()
        dist.all_reduce(total)
        self.told.append(float(total) / dist.get_world_size())
        return loss


class Held(transformers.TrainerCallback):
    """The engine's state after the saved step or a load."""

    def __init__(self, tp: int | None) -> None:
        self.tp = tp  # None: not compared with a run that is cut
        self.facts: Any = None
        self.trainer: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVED:
            self.look(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == SAVED and self.facts is None:
            self.look(state)

    def look(self, state: Any) -> None:
        trainer = self.trainer
        self.facts = {
            "params": deepspeed_tp_job.whole_state(trainer.deepspeed, self.tp)
            if self.tp
            else deepspeed_job.whole_state(trainer.deepspeed),
            "schedule": trainer.lr_scheduler.state_dict() if hasattr(trainer.lr_scheduler, "state_dict") else {},
            "logs": [
                {key: entry[key] for key in ("step", "learning_rate")} for entry in state.log_history[: SAVED - 1]
            ],
            "steps": trainer.deepspeed.global_steps,
        }


def trainer_of(run: dict[str, Any], folder: str, spoil: bool) -> Trainer:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    chosen = arguments(run, Path(folder))
    transformers.set_seed(99 if spoil else 7)
    model = MODELS[run["model"]](run.get("dropout", 0.0))
    if run.get("lora"):
        model = adapted(model, spoil)
    held = Held(run.get("tp"))
    made = Trainer(model=model, args=chosen, train_dataset=Data(), callbacks=[held])
    made.held, held.trainer = held, made
    return made


def adapted(model: Any, spoil: bool) -> Any:
    """An adapter over a frozen, unsaved model with fixed numbers."""
    import peft

    made = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=made) * 0.05)
    chosen = peft.LoraConfig(
        task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, chosen)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train to the end, and give the saved step the requested name."""
    runs = f"{job['folder']}.runs"
    trainer = trainer_of(job["run"], runs, spoil=False)
    trainer.train()
    if dist.get_rank() == 0:
        torch.save(trainer.held.facts, job["truth"])
        Path(runs, f"checkpoint-{SAVED}").rename(job["folder"])
    return {"before": trainer.told[:SAVED], "after": trainer.told[SAVED:]}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Resume from a folder, in a model of other numbers."""
    trainer = trainer_of(job["run"], f"{job['folder']}.runs", spoil=True)
    trainer.train(resume_from_checkpoint=job["folder"])
    truth = torch.load(job["truth"], weights_only=False)
    dtype = deepspeed_job.DTYPES[job["run"]["dtype"]]
    for kept in truth["params"].values():
        if "fp32" in kept:  # else it is frozen, under an adapter
            kept["weight"] = kept["fp32"].to(dtype)
    found = deepspeed_job.differences(trainer.held.facts, truth)
    if not job["run"].get("lora"):
        found += as_a_model(
            job["folder"], type(trainer.accelerator.unwrap_model(trainer.model)), truth["params"], dtype
        )
    if trainer.state.global_step != STEPS:
        found.append(f"{trainer.state.global_step} steps")
    return {"differences": found, "after": trainer.told}


def as_a_model(folder: str, kind: Any, truth: dict[str, Any], dtype: torch.dtype) -> list[str]:
    """Differences of the folder, as a model, from the one that trains."""
    unset_hf_deepspeed_config()  # else stage 3 would deal it to the ranks
    model = kind.from_pretrained(folder)
    found = [f"the model is in {model.dtype}"] * (model.dtype != dtype)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return found + deepspeed_job.differences(weights, {name: kept["weight"] for name, kept in truth.items()}, "model")


if __name__ == "__main__":
    deepspeed_job.main({"train": train, "load": load}, begin=lambda: PartialState(cpu=True))
