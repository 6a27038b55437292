"""Kinds of folders that training frameworks put around a checkpoint.

A kind is data: names that identify a folder, and a table of patterns with fates. The comments name its source.
"""

from __future__ import annotations

from ucpl.extents.containers import CompanionRule, Kind

__all__ = ["ACCELERATE", "KINDS", "TRAINER"]

# Classes that transformers itself allows in files of random numbers (trainer_pt_utils.safe_globals).
_NUMPY = frozenset(
    f"{module}.{name}"
    for module in ("numpy.core.multiarray", "numpy._core.multiarray", "numpy", "numpy.dtypes")
    for name in ("_reconstruct", "ndarray", "dtype", "UInt32DType")
)
# Classes of TrainingArguments. The caller has to allow a class of another library that extends them (trl's, say).
_ARGUMENTS = frozenset(
    (
        "accelerate.state.PartialState",
        "accelerate.utils.dataclasses.DeepSpeedPlugin",
        "accelerate.utils.dataclasses.DistributedType",
        "accelerate.utils.dataclasses.ParallelismConfig",
        "transformers.integrations.deepspeed.HfDeepSpeedConfig",
        "transformers.integrations.deepspeed.HfTrainerDeepSpeedConfig",
        "transformers.debug_utils.DebugOption",
        "transformers.trainer_pt_utils.AcceleratorConfig",
        "transformers.trainer_utils.EvaluationStrategy",
        "transformers.trainer_utils.FSDPOption",
        "transformers.trainer_utils.HubStrategy",
        "transformers.trainer_utils.IntervalStrategy",
        "transformers.trainer_utils.SaveStrategy",
        "transformers.trainer_utils.SchedulerType",
        "transformers.training_args.OptimizerNames",
        "transformers.training_args.ParallelMode",
        "transformers.training_args.TrainingArguments",
        "transformers.training_args_seq2seq.Seq2SeqTrainingArguments",
    )
)
_MODEL = "the model's own"

# Files of `save_pretrained` and of a tokenizer, in any folder.
_FILES = (
    CompanionRule("model.safetensors", "weights", "the model"),
    CompanionRule("model-*-of-*.safetensors", "weights", "the model"),
    CompanionRule("model.safetensors.index.json", "weights", "the model"),
    CompanionRule("pytorch_model.bin", "weights", "the model"),
    CompanionRule("pytorch_model-*-of-*.bin", "weights", "the model"),
    CompanionRule("pytorch_model.bin.index.json", "weights", "the model"),
    CompanionRule("adapter_model.safetensors", "weights", "an adapter"),
    CompanionRule("adapter_model.bin", "weights", "an adapter"),
    CompanionRule("*/adapter_model.safetensors", "weights", "an adapter"),
    CompanionRule("*/adapter_model.bin", "weights", "an adapter"),
    CompanionRule("adapter_config.json", "carry", _MODEL),
    CompanionRule("*/adapter_config.json", "carry", _MODEL),
    CompanionRule("config.json", "carry", _MODEL, of_model=True),
    CompanionRule("generation_config.json", "carry", _MODEL, of_model=True),
    CompanionRule("README.md", "carry", "the model's card"),
    CompanionRule("*token*.json", "carry", "the tokenizer's", of_model=True),
    CompanionRule("vocab.*", "carry", "the tokenizer's", of_model=True),
    CompanionRule("merges.txt", "carry", "the tokenizer's", of_model=True),
    CompanionRule("*.model", "carry", "the tokenizer's", of_model=True),
    CompanionRule("*.spm", "carry", "the tokenizer's", of_model=True),
    CompanionRule("*.tiktoken", "carry", "the tokenizer's", of_model=True),
    CompanionRule("chat_template*", "carry", "the tokenizer's", of_model=True),
    CompanionRule("*processor_config.json", "carry", "the processor's", of_model=True),
    CompanionRule("*.py", "carry", "the model's code", of_model=True),
)

# transformers 5.x, trainer.py. `train(resume_from_checkpoint=...)` reads `global_step*` and `latest` (through the engine),
# trainer_state.json, scheduler.pt if the schedule is not DeepSpeed's own, and rng_state.pth (one rank) or
# rng_state_{rank}.pth (several). Without scheduler.pt it loads no optimizer, unless an engine does. It reads neither the
# weights next to the shards nor training_args.bin: those are for users of the folder as a model.
TRAINER = Kind(
    name="trainer",
    title="transformers' Trainer",
    resumes_by="Trainer.train(resume_from_checkpoint=...)",
    marks=("trainer_state.json", "training_args.bin"),
    universal=True,
    strategies=True,
    needs=("trainer_state.json",),
    optimizer_with="scheduler.pt",
    rules=(
        CompanionRule("global_step*/**", "leave", "another step: name its folder to convert it"),
        CompanionRule("rng_state_{rank}.pth", "rank", "random numbers", alone="rng_state.pth", named=_NUMPY),
        CompanionRule(
            "trainer_state.json", "carry", "steps, logs and callbacks: nothing in it depends on the number of ranks"
        ),
        CompanionRule("scheduler.pt", "carry", "the learning rate's schedule"),
        CompanionRule("scaler.pt", "carry", "the gradient scaler"),
        CompanionRule("training_args.bin", "carry", "arguments of the run that wrote it", named=_ARGUMENTS),
        CompanionRule("zero_to_*.py", "carry", "DeepSpeed's scripts"),
        *_FILES,
    ),
)

_SCHEDULE = "Accelerate steps it once for each rank in every training step, unless the loop has split_batches"
_LOADER = (
    "it counts batches, and is at the same place where those of all ranks together are as large as before: where"
    " one rank's are, samples are left out or come again"
)

# accelerate 1.15, accelerator.py and checkpointing.py. `load_state` has each engine load the folder `pytorch_model`
# (`pytorch_model_1` for a second one) by that name, whatever `latest` says. Then it reads scheduler.bin if the schedule is
# not DeepSpeed's own, dl_state_dict.bin, sampler.bin, random_states_{rank}.pkl of its own rank, and custom_checkpoint_{n}.pkl
# for each registered object. It unpickles these last ones without restriction. A loop may add the model, by `save_model` or
# `save_pretrained`.
ACCELERATE = Kind(
    name="accelerate",
    title="Accelerate's save_state",
    resumes_by="Accelerator.load_state",
    marks=(
        "random_states_{rank}.pkl",
        "scheduler.bin",
        "sampler.bin",
        "dl_state_dict.bin",
        "custom_checkpoint_{rank}.pkl",
    ),
    needs=(),
    tag="pytorch_model",
    strategies=True,
    engines="pytorch_model_{rank}",
    rules=(
        CompanionRule("random_states_{rank}.pkl", "rank", "random numbers", named=_NUMPY),
        CompanionRule("scheduler.bin", "carry", "the learning rate's schedule", by_ranks=_SCHEDULE),
        CompanionRule("scheduler_*.bin", "carry", "the learning rate's schedule", by_ranks=_SCHEDULE),
        CompanionRule("dl_state_dict.bin", "carry", "a data loader's place", by_ranks=_LOADER),
        CompanionRule("dl_state_dict_*.bin", "carry", "a data loader's place", by_ranks=_LOADER),
        CompanionRule("sampler.bin", "carry", "a sampler of the data"),
        CompanionRule("sampler_*.bin", "carry", "a sampler of the data"),
        CompanionRule("scaler.pt", "carry", "the gradient scaler"),
        CompanionRule("custom_checkpoint_*.pkl", "carry", "objects that the loop has registered"),
        CompanionRule("zero_to_*.py", "carry", "DeepSpeed's scripts"),
        *_FILES,
    ),
)

# lightning 2.6, strategies/deepspeed.py. Loops, callbacks, schedules and hyper-parameters are in the shards' client_state,
# under keys of Lightning's; the engine's folder is called `checkpoint`. `fit(ckpt_path=...)` has the engine load it and reads
# nothing else.
LIGHTNING = Kind(
    name="lightning",
    title="Lightning's DeepSpeedStrategy",
    resumes_by="Trainer.fit(ckpt_path=...)",
    marks=(),
    needs=(),
    tag="checkpoint",
    client="pytorch-lightning_version",
    rules=(CompanionRule("zero_to_*.py", "carry", "DeepSpeed's scripts"),),
)

# `stepN` of OLMo-core: model_and_optim, and the trainer's state in `train`. `load` reads that of its own rank, or else of
# rank 0, so that all are carried to any number of ranks. Source: ai2-olmo-core 3.0, train/checkpoint.py.
OLMO = Kind(
    name="olmo_core",
    title="OLMo-core's Checkpointer",
    resumes_by="Checkpointer.load(...)",
    marks=(),
    needs=(),
    tag="model_and_optim",
    chunks=True,
    rules=(
        CompanionRule("train/rank*.pt", "carry", "the trainer's state"),
        CompanionRule(".metadata.json", "carry", "the version of OLMo-core"),
        CompanionRule("config.json", "carry", "the run's configuration"),
    ),
)
# NeMo 2 has an iteration in `weights`, and the configuration and the tokenizer in `context`. Megatron-Bridge has the state of
# training next to its iterations, too. Source: nemo 2.7, lightning/io; megatron-bridge, training/utils/checkpoint_utils.py.
NEMO = Kind(
    name="nemo",
    title="NeMo 2",
    resumes_by="nemo.lightning",
    marks=(),
    needs=(),
    tag="weights",
    iterations=True,
    rules=(CompanionRule("context/**", "carry", "the configuration of the run"),),
)
BRIDGE = Kind(
    name="megatron_bridge",
    title="Megatron-Bridge",
    resumes_by="load_checkpoint of Megatron-Bridge",
    marks=("latest_train_state.pt",),
    needs=("latest_train_state.pt",),
    iterations=True,
    rules=(
        CompanionRule("latest_train_state.pt", "carry", "the state of training"),
        CompanionRule("iter_**", "leave", "another iteration"),
        CompanionRule("latest_checkpointed_iteration.txt", "leave", "the target has its own"),
    ),
)
KINDS: tuple[Kind, ...] = (TRAINER, ACCELERATE, LIGHTNING, OLMO, NEMO, BRIDGE)
