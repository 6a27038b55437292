"""Errors on one of two gloo ranks: both report it and continue.

Both end with an error that names the rank, and no rank waits. All cases of a table run in one job; after each, an
all_reduce shows that the ranks are still in step.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import ucpl
from tests.forking import run_all
from ucpl.errors import UcplError
from ucpl.live.agreement import JobRanks
from ucpl.ranks.exchange import Exchange
from ucpl.ranks.storage_reader import StorageReader

TIMEOUT = 20
LONG = 120  # no case waits for it: its error would be another one
SPEC = (
    "ucpl 1\nmodel m {\n  dim n = 5, k = 12\n  w : n k dtype f32\n  b : n dtype f32\n}\n"
    'layout parts(tp = 2) of m {\n  framework torch()\n  mesh tp\n  file weights = torch "r{tp}.pt"\n'
    '  w = n k@tp as "w"\n  b = n as "b"\n}\n'
    'layout one() of m {\n  framework torch()\n  file weights = torch "a.pt"\n  w = n k as "w"\n  b = n as "b"\n}\n'
)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


class Boom(dict[str, torch.Tensor]):
    def keys(self) -> Any:
        raise RuntimeError("boom")

    __iter__ = items = keys


class Trouble(nn.Linear):
    def state_dict(self, *args: Any, **named: Any) -> Any:
        raise KeyError("a hook of the model")


def written(top: Path) -> None:
    for name, value in (("ck", 1.0), ("other", 2.0), ("smaller", 1.0)):
        torch.manual_seed(0)
        model = nn.Linear(6, 3 if name == "smaller" else 4)
        optimizer = adam(model)
        for p in model.parameters():
            p.data.fill_(value)
            p.grad = torch.ones_like(p)
        optimizer.step()
        state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
        save(state, checkpoint_id=top / name, no_dist=True)
    (top / "s.ucpl").write_text(SPEC)


def raising(*_: object, **__: object) -> None:
    raise OSError(5, "Input/output error")


def loading(case: str, odd: bool, top: Path) -> None:
    """`load_into` by a rank; `odd`: the one that has trouble."""
    model: Any = nn.Linear(6, 4)
    source, named = top / "ck", dict[str, Any]()
    has_optimizer = True
    match case if odd else "":
        case "another shape":
            model = nn.Linear(6, 5)
        case "a tensor more":
            model.extra = nn.Linear(2, 2)
        case "meta":
            model = model.to("meta")
        case "another dtype":
            model = model.to(torch.bfloat16)
        case "expanded":
            model.weight = nn.Parameter(torch.zeros(1, 6).expand(4, 6))
        case "sparse":
            model.weight = nn.Parameter(torch.zeros(4, 6).to_sparse())
        case "no source":
            source = top / "nowhere"
        case "another source":
            source = top / "other"
        case "another source of other sizes":
            source = top / "smaller"
        case "no optimizer":
            has_optimizer = False
        case "strict":
            named["strict"] = False
        case "a layout":
            named["layout"] = f"{top}/s.ucpl:one()"
        case "rename raises":
            named["rename"] = raising
        case "a model that raises":
            model = Trouble(6, 4)
        case "no model":
            model = "a text"
        case "no path":
            source = 5  # type: ignore[assignment]
        case "reshards instead":
            ucpl.reshard({}, f"{top}/s.ucpl:one()", f"{top}/s.ucpl:one()")
    optimizer = (
        adam(model) if has_optimizer and isinstance(model, nn.Module) else "an optimizer" if has_optimizer else None
    )
    if odd and case == "an optimizer of another model":
        optimizer = adam(nn.Linear(3, 3))
    with pytest.MonkeyPatch.context() as patch:
        if odd and case == "a disk that fails":
            patch.setattr(StorageReader, "_tensor", raising)
        ucpl.load_into(model, optimizer, source, **named)
    assert torch.equal(model.weight, nn.Linear(6, 4).weight.data.new_full((4, 6), model.weight[0, 0].item()))


# Each case: the faulty rank, its message, and the message of the other rank.
LOADING = {
    "another shape": ("E646: weight is [5, 6] in the job, and [4, 6] in the checkpoint (rank 1)",) * 2,
    "a tensor more": ("E646: the model has extra.weight, and the checkpoint has not; so extra.bias (rank 1)",) * 2,
    "meta": ("E646: weight of the job is a tensor on no device (meta)", "E644: rank 1 failed: weight of the job is a t"),
    "another dtype": ("E646: weight is torch.float32 on rank 0, and torch.bfloat16 on rank 1",) * 2,
    "expanded": ("E646: weight of the job is a view whose elements", "E644: rank 1 failed: weight of the job is a view"),
    "sparse": ("E646: weight of the job is a tensor of torch.float32 and layout", "E644: rank 1 failed: weight of the"),
    "no source": ("E437: ", "E644: rank 1 failed: "),
    "another source": ("E625: ", "E625: "),
    "another source of other sizes": ("E625: ", "E625: "),
    "no optimizer": ("E622: rank 1 was given another optimizer than rank 0",) * 2,
    "strict": ("E622: rank 1 was given another strict than rank 0",) * 2,
    "a layout": ("E622: rank 1 was given another layout than rank 0",) * 2,
    "rename raises": ("OSError: ", "E644: rank 1 failed: OSError: "),
    "a model that raises": ("KeyError: ", "E644: rank 1 failed: KeyError: 'a hook of the model'"),
    "no model": ("TypeError: load_into() fills a module", "E644: rank 1 failed: TypeError: load_into() fills a"),
    "no path": ("TypeError: ", "E644: rank 1 failed: TypeError: "),
    "an optimizer of another model": ("E646: the optimizer holds 2 par", "E644: rank 1 failed: the optimizer holds 2 par"),
    "a disk that fails": ("E644: rank 1 failed: OSError: [Errno 5] Input/output error",) * 2,
    "reshards instead": ("E622: rank 1 calls reshard, and rank 0 load_into",) * 2,
}  # fmt: skip


def resharding(case: str, odd: bool, top: Path) -> None:
    whole, rank = torch.arange(60.0).view(5, 12), dist.get_rank()
    state: Any = {"w": whole[:, 6 * rank : 6 * rank + 6], "b": torch.arange(5.0)}
    match case if odd else "":
        case "another dtype":
            state["w"] = state["w"].double()
        case "another shape":
            state["w"] = state["w"][:4]
        case "a tensor less":
            del state["w"]
        case "a tensor more":
            state["x"] = torch.zeros(3)
        case "sparse":
            state["w"] = state["w"].to_sparse()
        case "an array":
            state["w"] = state["w"].numpy()
        case "a dict that raises":
            state = Boom(state)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0 and case == "what arrives cannot be put":  # of many rounds the first
            patch.setattr(Exchange, "_unpacked", raising)
        made = ucpl.reshard(state, f"{top}/s.ucpl:parts(tp=2)", f"{top}/s.ucpl:one()", memory=64)
    assert rank == 1 or torch.equal(made["w"], whole)


RESHARDING = {
    "another dtype": ("E640: w is torch.float64, the layout says f32", "E644: rank 1 failed: w is torch.float64"),
    "another shape": ("E640: w is [4, 6], the layout says [5, 6]", "E644: rank 1 failed: w is [4, 6]"),
    "a tensor less": ("E640: w of parts", "E644: rank 1 failed: w of parts(tp = 2): it is missing"),
    "a tensor more": ("E640: x of parts", "E644: rank 1 failed: x of parts"),
    "sparse": (
        "E640: w of parts(tp = 2) is a tensor of torch.float32 and layout torch.sparse_coo",
        "E644: rank 1 failed: w of",
    ),
    "an array": ("E640: w of parts(tp = 2) is a ndarray", "E644: rank 1 failed: w of parts(tp = 2) is a ndarray"),
    "a dict that raises": ("RuntimeError: boom", "E644: rank 1 failed: RuntimeError: boom"),
    "what arrives cannot be put": ("E644: rank 0 failed: OSError: [Errno 5] Input/output error", "OSError: [Errno 5]"),
}


def by_dcp(case: str, odd: bool, top: Path) -> None:
    model = nn.Linear(6, 4)
    fully_shard(model)
    state: Any = {f"model.{name}": value for name, value in get_model_state_dict(model).items()}
    source = top / "ck"
    match case if odd else "":
        case "no source":
            source = top / "nowhere"
        case "another source":
            source = top / "other"
    reader = ucpl.StorageReader(source)
    with pytest.MonkeyPatch.context() as patch:
        if odd and case == "a disk that fails":
            patch.setattr(reader, "_tensor", raising)
        load(state, storage_reader=reader)


BY_DCP = {
    "no source": ("E437: ",) * 2,
    "another source": ("E625: ",) * 2,
    "a disk that fails": ("OSError: [Errno 5]",) * 2,
}  # fmt: skip


def flat_sharded(_: str, odd: bool, top: Path) -> None:
    """FSDP's first version, whose state dict has tensors of several shards."""
    model = nn.Linear(6, 4)
    ucpl.load_into(FullyShardedDataParallel(model, device_id=torch.device("cpu")), None, top / "ck")
    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert len(mine) and mine.unique().numel() == 1 and odd == (dist.get_rank() == 1)


TABLES: dict[str, tuple[Callable[[str, bool, Path], None], dict[str, tuple[str, str]]]] = {
    "load_into": (loading, LOADING), "reshard": (resharding, RESHARDING), "dcp.load": (by_dcp, BY_DCP),
    "FSDP1": (flat_sharded, {}),
}  # fmt: skip


def said(error: BaseException | None) -> str:
    if isinstance(error, UcplError):
        return f"{error.diagnostics[0].code}: {error.diagnostics[0].message}"
    if isinstance(error, CheckpointException):
        assert dist.get_rank() in (0, 1) and list(error.failures)
        return said(next(iter(error.failures.values()))[0])
    return "" if error is None else f"{type(error).__name__}: {error}"


def ranked(rank: int, port: int, top: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=LONG))
    found: dict[tuple[str, str], tuple[str, float]] = {}
    for table, (act, cases) in TABLES.items():
        for case in (*cases, "no trouble"):
            error = None
            try:
                act(case, rank == 1, top)
            except (Exception, CheckpointException) as caught:
                error = caught
            both = torch.ones(())
            dist.all_reduce(both)  # a script's own
            found[table, case] = said(error), both.item()
    torch.save(found, top / f"{rank}.told")
    os._exit(0)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], tuple[str, float]]]:
    top = tmp_path_factory.mktemp("agreement")
    written(top)
    run_all(2, ranked, top)
    return [torch.load(top / f"{rank}.told") for rank in range(2)]


@pytest.mark.parametrize(
    ("table", "case"), [(table, case) for table, (_, cases) in TABLES.items() for case in (*cases, "no trouble")]
)
def test_one_rank_in_trouble_ends_both_with_the_reason(told, table, case):
    mine, others = TABLES[table][1].get(case, ("", ""))
    for rank, text in ((1, mine), (0, others)):
        found, both = told[rank][table, case]
        assert found.startswith(text) and bool(found) == (case != "no trouble"), (rank, found)
        assert both == 2.0
        if found and not found.startswith(("E622", "E625", "E646")):
            assert rank == 1 or "rank 1" in found or table == "dcp.load" or "arrives" in case, found


def gone(rank: int, port: int, top: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    if rank == 1:
        pytest.MonkeyPatch().setattr(StorageReader, "_tensor", lambda *_: os._exit(0))
    try:
        ucpl.load_into(nn.Linear(6, 4), None, top / "ck")
        (top / "told").write_text("loaded")
    except UcplError as error:
        (top / "told").write_text(str(error))
    os._exit(0)


def test_a_rank_that_dies_ends_the_other(tmp_path):
    written(tmp_path)
    run_all(2, gone, tmp_path)
    assert (tmp_path / "told").read_text().startswith("E644: a rank is dead or does not answer: ")


def test_a_process_without_a_group_agrees_with_itself():
    ranks = JobRanks.of()
    assert (ranks.rank, ranks.size, ranks.all(5), ranks.all_agree(False)) == (0, 1, [5], False)
    with pytest.raises(ValueError, match="mine"), ranks.agreeing():
        raise ValueError("mine")
    with pytest.raises(RuntimeError, match="torch's own"), ranks.together():
        raise RuntimeError("torch's own")
