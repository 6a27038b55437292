"""Hyper-parameters in Megatron's loaded optimizer. `python megatron_groups_job.py JOBS`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def load(job: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of each trained parameter, and the complaints of the loader."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    from tests.interop import megatron_job

    if job["run"]["fsdp"]:  # as Megatron-LM loads without --strict-fsdp-dtensor-load: another framework has no `max_lr`
        from tests.interop import megatron_fsdp_run

        setattr(megatron_fsdp_run, "DefaultLoadPlanner", lambda **_: DefaultLoadPlanner(allow_partial_load=True))  # noqa: B010
    run = megatron_job.run_of(job["run"], seed=99)
    run.schedule.load_state_dict = lambda *_: None
    told = run.load(job["folder"])
    return {"differences": told, "rates": dict(run.rates())}


def main() -> None:
    import torch

    from tests.interop import jobs, megatron_run  # noqa: F401  # once, for all jobs

    torch.set_num_threads(1)
    jobs.do_all({"load": load})


if __name__ == "__main__":
    main()
