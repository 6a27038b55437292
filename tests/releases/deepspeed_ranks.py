"""DeepSpeed of one release: it trains, saves, loads and compares. `python deepspeed_ranks.py JOBS`."""

from __future__ import annotations

import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.releases import stand_ins


def tie_one_weight(models: Any) -> None:
    """Tie by one attribute, as before 0.16, which takes no lists."""
    from deepspeed import pipe

    class Tied(pipe.TiedLayerSpec):
        def __init__(self, *given: Any, tied_weight_attr: Any = None, **more: Any) -> None:
            super().__init__(*given, tied_weight_attr="weight", **more)

    pipe.TiedLayerSpec = Tied
    models.Embedding.weight = property(lambda self: self.word.weight)


def give_mpu(initialize: Any) -> Any:
    def call(*given: Any, config: Any, **more: Any) -> Any:
        if "checkpoint" in config:  # a universal folder
            more["mpu"] = stand_ins.Alone()
        return initialize(*given, config=config, **more)

    return call


def main() -> None:
    importlib.import_module("setuptools")  # before distutils, which old releases import
    stand_ins.early()
    import deepspeed

    stand_ins.late()
    from tests.interop import deepspeed_job, jobs, parallel_job, parallel_models

    torch.set_num_threads(1)
    client: dict[str, Any] = deepspeed_job.CLIENT
    client["iteration"] = 3  # which the loader of universal folders of 0.12 and 0.13 asks for
    if tuple(map(int, deepspeed.__version__.split(".")[:2])) < (0, 16):
        tie_one_weight(parallel_models)
    if "mpu" in stand_ins.wanted():
        deepspeed.initialize = give_mpu(deepspeed.initialize)
    flat = {"train": deepspeed_job.train, "load": deepspeed_job.load}
    parallel = {"train_parallel": parallel_job.train, "load_parallel": parallel_job.load}
    jobs.do_all({**flat, **parallel}, partial(deepspeed.init_distributed, dist_backend="gloo"))


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # as torch does up to 2.5
    main()
