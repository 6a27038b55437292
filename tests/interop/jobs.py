"""What all scripts that run under torchrun share: the list of jobs, their results, and how two states differ."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def differences(mine: Any, truth: Any, where: str = "") -> list[str]:
    """Everything that is not bit-equal, by name."""
    if isinstance(truth, dict):
        out = [f"{where}/{k} is missing" for k in truth if k not in mine]
        out += [f"{where}/{k} is new" for k in mine if k not in truth]
        return out + [d for k in truth if k in mine for d in differences(mine[k], truth[k], f"{where}/{k}")]
    if torch.is_tensor(truth):
        same = torch.is_tensor(mine) and mine.dtype == truth.dtype and torch.equal(mine, truth)
        return [] if same else [f"{where} differs"]
    return [] if mine == truth else [f"{where} is {mine!r}, not {truth!r}"]


def do_all(do: dict[str, Any], together: bool = True) -> None:
    """Do the jobs listed in the file that the command line names, each by the function of its name.

    Ranks fail `together`; where one may fail alone, its error ends the processes, or the others would wait for it.
    """
    for job in json.loads(Path(sys.argv[1]).read_text()):
        try:
            result = do[job["do"]](job)
        except Exception:  # whatever ends a job is its result, which a test shows: the other jobs still run
            result = {"error": traceback.format_exc()[-3000:]}
            if not together:
                with contextlib.suppress(FileExistsError), open(job["result"], "x") as file:  # the first rank's to fail
                    json.dump(result, file)
                os._exit(1)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, result)
        if dist.get_rank() == 0:
            worst = next((r for r in every if "error" in r), None) or next(
                (r for r in every if r.get("differences")), every[0]
            )
            with open(job["result"], "w") as file:
                json.dump(worst, file)
    leave()


def leave() -> None:
    """End a rank when all have done their work.

    Not through the interpreter's own shutdown: threads of torch's that are still there may abort it ("terminate called
    without an active exception"), and torchrun then calls a job failed whose results are all there.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
