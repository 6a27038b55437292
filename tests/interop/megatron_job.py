"""GPTModels of Megatron-Core, for ranks: `python megatron_job.py JOBS`.

As dcp_job. These processes do not import ucpl. Each job has its own degrees and processes. Megatron's writer starts a
process that imports this file once more, so all imports are in functions.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))


def run_of(run: dict[str, Any], seed: int) -> Any:
    if run.get("fsdp"):
        from tests.interop.megatron_fsdp_run import FsdpRun

        return FsdpRun(run, seed)
    from tests.interop.megatron_run import Run

    return Run(run, seed)


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Train, save in each requested form, and train.

    A restart needs equal losses.
    """
    import torch
    import torch.distributed as dist

    run = run_of(job["run"], seed=7)
    if rate := job.get("rate"):
        steady(run, rate)
    before = run.losses(job["steps"])
    for folder, form in job["saves"].items():
        run.save(folder, **form)
    facts = run.facts()
    if dist.get_rank() == 0:
        torch.save(facts, job["truth"])
    return {"before": before, "after": run.losses(3)}


def load(job: dict[str, Any]) -> dict[str, Any]:
    """Load into a run of other values, compare, train on."""
    import torch

    from tests.interop import jobs

    run = run_of(job["run"], seed=99)
    told = run.load(job["folder"])
    truth = torch.load(job["truth"], weights_only=False)
    found = told + jobs.differences(common_facts(run.facts()), common_facts(truth))
    return {"differences": found, "after": run.losses(3)}


def again(job: dict[str, Any]) -> dict[str, Any]:
    """Load a run and save it in other forms."""
    run = run_of(job["run"], seed=99)
    told = run.load(job["folder"])
    for folder, form in job["saves"].items():
        run.save(folder, **form)
    return {"differences": told}


def go_on(job: dict[str, Any]) -> dict[str, Any]:
    """Load another framework's checkpoint, and train at its rates."""
    run = run_of(job["run"], seed=99)
    told = run.load(job["folder"])
    assert run.done == job["steps"]
    steady(run)
    return {"differences": told, "after": run.losses(3)}


def steady(run: Any, rate: float | None = None) -> None:
    """From here on no schedule sets the rate."""
    for group in run.optimizer.param_groups if rate is not None else ():
        group["lr"] = rate
    run.schedule.step = lambda **_: None


def common_facts(facts: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The values of all kinds of optimizers.

    In fp32, the master is the weight itself; Megatron-FSDP has only masters, and a weight is the rounded one.
    """
    import torch

    out = {}
    for name, states in facts.items():
        if "weight" not in states:
            states = {**states, "weight": states["fp32"].bfloat16()}
        is_same = "fp32" in states and states["weight"].dtype == torch.float32
        assert not is_same or torch.equal(states["fp32"], states["weight"])
        out[name] = {k: v for k, v in states.items() if not (is_same and k == "fp32")}
    return out


def main() -> None:
    import torch

    from tests.interop import jobs, megatron_run  # noqa: F401  # once, for all jobs

    torch.set_num_threads(1)
    jobs.do_all({do.__name__: do for do in (train, load, again, go_on)})


if __name__ == "__main__":
    main()
