"""State dicts of DTensors that each rank saves alone, made by torch.

The process group sends nothing.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import ucpl
from tests.files.values import bare
from ucpl.errors import UcplError
from ucpl.formats.opening import open_checkpoint

FIXTURES = Path(__file__).parents[2] / "fixtures" / "dcp"
RANKS, TP = 4, 2
W = torch.arange(7.0 * 6).reshape(7, 6)
COLUMN = torch.arange(100.0, 100 + 4 * 5).reshape(4, 5)
NORM = torch.arange(200.0, 205.0).bfloat16()


def chunk(tensor: torch.Tensor, dim: int, at: int, ways: int = 2) -> torch.Tensor:
    """As torch.chunk gives it; nothing, where there are fewer chunks."""
    found = torch.chunk(tensor, ways, dim)
    return found[at].clone() if at < len(found) else tensor.narrow(dim, 0, 0).clone()


def state_dict(rank: int) -> dict[str, torch.Tensor]:
    """A rank's tensors of FSDP2 over tp.

    (fsdp, tp) is (rank // 2, rank % 2).
    """
    mesh = init_device_mesh("cpu", (RANKS // TP, TP), mesh_dim_names=("fsdp", "tp"))
    fsdp, tp = divmod(rank, TP)

    def made(local: torch.Tensor, whole: torch.Tensor, *placements: Shard | Replicate | _StridedShard) -> DTensor:
        return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride(), run_check=False)

    return {
        "w": made(chunk(chunk(W, 0, tp), 0, fsdp), W, _StridedShard(0, split_factor=TP), Shard(0)),
        "column": made(chunk(chunk(COLUMN, 1, tp), 0, fsdp), COLUMN, Shard(0), Shard(1)),
        "norm": made(chunk(NORM, 0, fsdp), NORM, Shard(0), Replicate()),
        "counted": torch.tensor(3),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            torch.save(state_dict(rank), tmp_path / f"model_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    yield tmp_path


def test_ranks_are_read_exactly_and_converted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    made = tmp_path_factory.mktemp("made")
    found = open_checkpoint(folder)
    assert (found.state.settings["fsdp"].value, found.state.settings["tp"].value) == (2, 2)
    assert {t.name: t.kind for t in found.state.tensors} == dict.fromkeys(("w", "column", "norm"), "parameter") | {
        "counted": "buffer"
    }
    ucpl.convert(folder, made / "plain.pt", to="plain()")
    plain = torch.load(made / "plain.pt", weights_only=True)
    for name, wanted in (("w", W), ("column", COLUMN), ("norm", NORM)):
        assert torch.equal(plain["params"][name]["weight"], wanted), name
    assert plain["buffers"]["counted"] == 3
    ucpl.convert(folder, made / "dcp", to="dcp(fsdp = 3, tp = 1)")
    assert ucpl.compare(folder, made / "dcp")


def like(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor with another one's placement, which sums and products may change."""
    where = tensor.device_mesh, tensor.placements
    return DTensor.from_local(local, *where, shape=tensor.shape, stride=tensor.stride(), run_check=False)


def saved(folder: Path, change: Callable[[int, dict[str, Any]], object] = lambda rank, state: None) -> None:
    """Save the optimizer of each rank as in verl.

    They include all parameters with a gradient.
    """
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            trained = [t for t in state_dict(rank).values() if isinstance(t, DTensor)]
            held = {}
            for i, t in enumerate(trained):
                mine = t.to_local().float()
                held[i] = {"step": torch.tensor(4.0), "exp_avg": like(t, mine * 2), "exp_avg_sq": like(t, mine * mine)}
            state = {"state": held, "param_groups": [{"lr": 0.5, "betas": (0.9, 0.95), "params": [0, 1, 2]}]}
            change(rank, state)
            torch.save(state, folder / f"optim_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("form", ["plain()", "dcp(fsdp=3, tp=1)", "zero1(dp=3, tp=1)"])
def test_the_optimizer_s_numbers_are_the_model_s_parameters(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, form: str
) -> None:
    saved(folder)
    made = tmp_path_factory.mktemp("made")
    ucpl.convert(folder, made / "there", to=form)
    ucpl.convert(made / "there", made / "plain.pt", to="plain()")
    plain = torch.load(made / "plain.pt", weights_only=True)
    for name, wanted in (("w", W), ("column", COLUMN), ("norm", NORM)):
        held = plain["params"][name]
        assert torch.equal(held["weight"], wanted), name
        assert torch.equal(held["exp_avg"], wanted.float() * 2) and held["step"] == 4, name
        assert torch.equal(held["exp_avg_sq"], wanted.float() * wanted.float()), name
    assert [(g["lr"], g["params"]) for g in plain["groups"]] == [(0.5, ["w", "column", "norm"])]
    assert ucpl.compare(folder, made / "there")


def test_an_order_names_the_numbers_of_ranks(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    saved(folder, lambda rank, state: state["param_groups"][0].update(params=[1, 0, 2]))
    made = tmp_path_factory.mktemp("made")
    (made / "names.txt").write_text("column\nw\nnorm\n")
    with pytest.raises(UcplError, match=r"E467.*--order FILE"):
        ucpl.plan(str(folder), "plain()")
    ucpl.convert(folder, made / "plain.pt", "plain()", order=made / "names.txt")
    plain = torch.load(made / "plain.pt", weights_only=True)
    for name, wanted in (("w", W), ("column", COLUMN), ("norm", NORM)):
        assert torch.equal(plain["params"][name]["exp_avg"], wanted.float() * 2), name
    assert [g["params"] for g in plain["groups"]] == [["column", "w", "norm"]]
    for names in ("w\ncolumn\nnorm", "w\ncolumn", "column\nw\nw", "column\nw\nnone"):
        (made / "other.txt").write_text(names)
        with pytest.raises(UcplError, match="E466"):
            ucpl.plan(str(folder), "plain()", order=made / "other.txt")


def test_a_second_name_of_a_tied_tensor_is_found_by_its_bytes(folder: Path) -> None:
    saved(folder)
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            state = state_dict(rank)
            torch.save(state | {"head": state["w"]}, folder / f"model_world_size_{RANKS}_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()
    found = open_checkpoint(folder)
    assert found.state.aliases == {"head": "w"} and [t.name for t in found.state.tensors] == [
        "w",
        "column",
        "norm",
        "counted",
    ]
    assert found.state.groups[0].members == ("w", "column", "norm")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda rank, s: s["param_groups"][0].update(params=[1, 0, 2]), "no order of the model fits"),
        (lambda rank, s: s["state"][1].update(exp_avg=torch.ones(5)) or s["state"][1].pop("exp_avg_sq"), "flat"),
        (lambda rank, s: (s["state"].clear(), s["param_groups"][0].update(params=[0, 1])), "may have more than one"),
    ],
    ids=["another order", "flat states", "none that tells"],
)  # fmt: skip
def test_an_optimizer_without_names_is_left_out(
    folder: Path, change: Callable[[int, dict[str, Any]], object], said: str
) -> None:
    saved(folder, change)
    found = open_checkpoint(folder)
    mine = [one for one in found.not_read if one.is_optimizer]
    assert [one.name for one in mine] == [f"optim_world_size_{RANKS}_rank_{rank}.pt" for rank in range(RANKS)]
    assert all(said in one.why for one in mine), mine
    with pytest.raises(UcplError, match="E467"):
        ucpl.plan(str(folder), "zero1(dp=2, tp=1)")
    assert found.state.groups == () and {t.states for t in found.state.tensors} == {()}


def test_the_optimizer_of_other_ranks_is_refused(folder: Path) -> None:
    saved(folder)
    (folder / "optim_world_size_4_rank_3.pt").unlink()
    with pytest.raises(UcplError, match=r"optim_world_size_4_rank_3\.pt is missing"):
        open_checkpoint(folder)
    for rank in range(RANKS - 1):
        file = folder / f"optim_world_size_4_rank_{rank}.pt"
        file.rename(folder / f"optim_world_size_3_rank_{rank}.pt")
    with pytest.raises(UcplError, match="runs of 3 and of 4 ranks"):
        open_checkpoint(folder)


def test_replicas_that_differ_are_refused(folder: Path) -> None:
    path = folder / "model_world_size_4_rank_1.pt"
    part = path.read_bytes()
    assert ucpl.verify(folder)
    dist.init_process_group("fake", rank=1, world_size=RANKS, store=FakeStore())
    try:
        state = state_dict(1)
        state["norm"].to_local().add_(1)  # type: ignore[attr-defined]
        torch.save(state, path)
    finally:
        dist.destroy_process_group()
    assert path.read_bytes() != part
    for verb in (ucpl.verify, open_checkpoint):  # nothing is converted of it
        with pytest.raises(UcplError, match="copies of `norm` differ") as found:
            verb(folder)
        assert found.value.diagnostics[0].code == "E700"
    for file in folder.glob("*.pt"):
        bare(file)
    with pytest.raises(UcplError, match="copies of `norm` differ"):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        (
            torch.zeros(7, 6),
            "E456",
            r"`w` is .* over _StridedShard\(0\), Shard\(0\) in one file, and \[7, 6\] f32 in another",
        ),
        ("a text", "E455", "expected is a tensor or a DTensor"),
        (torch.nn.Linear, "E455", "expected is a tensor or a DTensor"),
    ],
)
def test_what_is_no_part_of_a_tensor_is_refused(folder: Path, value: object, code: str, said: str) -> None:
    """A full tensor or another value of a rank is reported."""
    path = folder / "model_world_size_4_rank_3.pt"
    torch.save({"w": value}, path)
    with pytest.raises(UcplError, match=said) as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == code


def test_a_rank_that_is_gone_and_another_run_are_refused(folder: Path) -> None:
    path = folder / "model_world_size_4_rank_2.pt"
    kept = path.read_bytes()
    path.unlink()
    with pytest.raises(UcplError, match=r"model_world_size_4_rank_2\.pt is missing") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E452"
    path.write_bytes(kept)
    (folder / "model_world_size_8_rank_0.pt").write_bytes(kept)
    with pytest.raises(UcplError, match="runs of 4 and of 8 ranks") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E454"


def test_a_part_that_is_not_what_its_placements_make_is_refused(folder: Path) -> None:
    """Coordinates of another rank, whose archive has no name of a rank."""
    renamed = io.BytesIO()
    torch.save(torch.load(folder / "model_world_size_4_rank_3.pt", weights_only=False), renamed)
    (folder / "model_world_size_4_rank_0.pt").write_bytes(renamed.getvalue())
    with pytest.raises(UcplError, match=r"element \[0, 0\] of `w` is in no chunk") as found:
        open_checkpoint(folder)
    assert found.value.diagnostics[0].code == "E521"


# ---- one rank, which saves plain tensors -----------------------------------------------------------------------------


def trained(model: torch.nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(12.0).reshape(2, 6)).square().mean().backward()
        optimizer.step()
    return optimizer


def alone(folder: Path, model: dict[str, Any], optimizer: dict[str, Any]) -> Path:
    folder = folder / "run"
    folder.mkdir(exist_ok=True)
    torch.save(model, folder / "model_world_size_1_rank_0.pt")
    torch.save(optimizer, folder / "optim_world_size_1_rank_0.pt")
    return folder


def test_the_optimizer_of_one_rank_is_read_by_its_shapes(tmp_path: Path) -> None:
    """One GPU with a frozen layer: shapes fit the numbers."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    model[0].requires_grad_(False)
    optimizer = trained(model)
    source = alone(tmp_path, model.state_dict(), optimizer.state_dict())
    ucpl.convert(source, tmp_path / "plain.pt", "plain()")
    held = torch.load(tmp_path / "plain.pt", weights_only=True)
    names = ["1.weight", "1.bias", "2.weight"]
    assert [(g["lr"], g["params"]) for g in held["groups"]] == [(0.5, names)]
    for name, p in model.named_parameters():
        mine = held["params"][name]
        assert torch.equal(mine["weight"], p) and ("exp_avg" in mine) is (name in names)
        for state, value in optimizer.state[p].items():
            assert torch.equal(torch.as_tensor(mine[state]), value.reshape(mine[state].shape)), (name, state)
    ucpl.convert(source, tmp_path / "stage3", "zero3(dp=2)")  # which has places for frozen weights alone
    assert ucpl.compare(source, tmp_path / "stage3")
    assert {t.name for t in open_checkpoint(source).state.tensors if t.kind == "frozen"} == {"0.weight", "0.bias"}


def test_the_flat_optimizer_of_one_rank_is_read(tmp_path: Path) -> None:
    """FSDP1 without `use_orig_params`: one flat parameter, with flat states."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = trained(model)
    flat = {
        state: torch.cat([optimizer.state[p][state].flatten() for p in model.parameters()])
        for state in ("exp_avg", "exp_avg_sq")
    }
    said = {"state": {0: {"step": torch.tensor(2.0), **flat}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    ucpl.convert(alone(tmp_path, model.state_dict(), said), tmp_path / "plain.pt", "plain()")
    held = torch.load(tmp_path / "plain.pt", weights_only=True)["params"]
    for name, p in model.named_parameters():
        assert torch.equal(held[name]["exp_avg"], optimizer.state[p]["exp_avg"]) and held[name]["step"] == 2


def test_numbers_of_one_rank_that_may_be_several_parameters_are_refused(tmp_path: Path) -> None:
    two = {name: torch.randn(6, 6) for name in ("first", "second")}
    said = {"state": {0: {"exp_avg": torch.zeros(6, 6)}}, "param_groups": [{"lr": 0.5, "params": [0]}]}
    with pytest.raises(UcplError, match="E467"):
        ucpl.plan(str(alone(tmp_path, two, said)), "plain()")


def test_frozen_parameters_in_a_group_of_one_rank_stay_in_it(tmp_path: Path) -> None:
    """An optimizer of all parameters, some without any gradient."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.arange(12.0).reshape(2, 6)).square().mean().backward()
    optimizer.step()
    ucpl.convert(alone(tmp_path, model.state_dict(), optimizer.state_dict()), tmp_path / "out", "dcp(fsdp=1)")
    found = open_checkpoint(tmp_path / "out").state.groups
    assert [one.every for one in found] == [tuple(name for name, _ in model.named_parameters())]
    assert [one.members for one in found] == [("1.weight", "1.bias", "2.weight", "2.bias")]


# ---- items of torch_checkpointing, one file of each rank -------------------------------------------------------------

NAMES = ("w", "column", "norm")


def items(folder: Path, besides: Callable[[int, dict[str, Any]], dict[str, Any]] = lambda rank, model: {}) -> Path:
    """A folder as torch_checkpointing 0.1.1 writes it.

    Its optimizer has names.
    """
    folder.mkdir()
    for rank in range(RANKS):
        dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
        try:
            model: dict[str, Any] = state_dict(rank) | {"pos": torch.full((2, 3), 7.0)}
            model["head"] = model["w"]
            mesh = model["w"].device_mesh
            model["void"] = DTensor.from_local(
                torch.zeros(0, 3),
                mesh,
                (Shard(0), Replicate()),
                shape=torch.Size((0, 3)),
                stride=(3, 1),
                run_check=False,
            )
            states: dict[str, dict[str, object]] = {}
            for name in (*NAMES, "void"):
                mine = model[name].to_local().float()
                states[name] = {"step": torch.tensor(4.0), "exp_avg": like(model[name], mine * 2)}
            groups = [{"lr": 0.5, "params": ["norm", "w"]}, {"lr": 0.25, "params": ["pos", "column", "void"]}]
            held = {"model": model, "optimizer": {"state": states, "param_groups": groups}, "step": 4}
            for item, value in (held | besides(rank, model)).items():
                torch.save(value, folder / f"{item}_{rank}.pt")
        finally:
            dist.destroy_process_group()
    of_items = {"model": {"nested_path_to_metadata": {}, "rank_to_layout_info": dict.fromkeys(range(RANKS))}}
    (folder / "metadata.pkl").write_bytes(
        pickle.dumps({"metadata": of_items, "world_size": RANKS, "version": "2.0"}, protocol=4)
    )
    return folder


@pytest.mark.parametrize("form", ["plain()", "dcp(fsdp=3, tp=1)", "zero1(dp=3, tp=1)"])
def test_items_of_torch_checkpointing_are_read_exactly(form: str, tmp_path: Path) -> None:
    source = items(tmp_path / "in")
    ucpl.convert(source, tmp_path / "there", to=form)
    ucpl.convert(tmp_path / "there", tmp_path / "plain.pt", to="plain()")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    for name, wanted in zip(NAMES, (W, COLUMN, NORM), strict=True):
        held = plain["params"][name]
        assert torch.equal(held["weight"], wanted), name
        assert torch.equal(held["exp_avg"], wanted.float() * 2) and held["step"] == 4, name
    assert plain["aliases"] == {"head": "w"} and torch.equal(plain["params"]["pos"]["weight"], torch.full((2, 3), 7.0))
    assert [group["lr"] for group in plain["groups"]] == [0.5, 0.25]
    assert [sorted(set(group["params"]) - {"pos", "void"}) for group in plain["groups"]] == [["norm", "w"], ["column"]]
    assert open_checkpoint(source).state.carried == {"step": 4}
    assert ucpl.compare(source, tmp_path / "there") and ucpl.verify(source)


def test_values_that_only_one_rank_has_are_named(tmp_path: Path) -> None:
    def besides(rank: int, model: dict[str, Any]) -> dict[str, Any]:
        return {"rng": {"seed": rank, "epoch": 1}, "ema": {"w": model["w"]}} | (
            {"config": {"a": 1}} if not rank else {}
        )

    found = open_checkpoint(items(tmp_path / "in", besides))
    assert found.state.carried == {"step": 4, "rng": {"seed": 0, "epoch": 1}, "config": {"a": 1}}
    parts = [f"ema_{rank}.pt" for rank in range(RANKS)]
    assert {one.name for one in found.not_read} == {*parts, *(f"rng_{rank}.pt: rng/seed" for rank in range(1, RANKS))}


def test_ranks_of_torch_checkpointing_that_are_gone_or_of_another_run_are_refused(tmp_path: Path) -> None:
    source = items(tmp_path / "in")
    for item in ("model", "optimizer"):
        file = source / f"{item}_3.pt"
        kept = file.read_bytes()
        file.unlink()
        with pytest.raises(UcplError, match=rf"E452: {item}_3\.pt is missing: 4 ranks have saved"):
            open_checkpoint(source)
        (source / f"{item}_4.pt").write_bytes(kept)
        with pytest.raises(UcplError, match=r"E454: .* has files of runs of 4 and of 5 ranks"):
            open_checkpoint(source)
        (source / f"{item}_4.pt").rename(file)
    (source / "metadata.pkl").write_bytes(pickle.dumps({"version": "2.0"}))
    with pytest.raises(UcplError, match=r"E455: metadata\.pkl: world_size"):
        open_checkpoint(source)


def test_keys_of_an_empty_tensor_and_of_its_states_are_kept(tmp_path: Path) -> None:
    """A loader requests all of them."""
    call = 'dcp(fsdp=3, tp=1, prefix="model.", states="optim.state.")'
    ucpl.convert(items(tmp_path / "in"), tmp_path / "out", call)
    keys = FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert {key for key in keys if "void" in key} == {
        "model.void",
        "optim.state.void.exp_avg",
        "optim.state.void.step",
    }
    listed = torch.zeros(0)
    values: dict[str, Any] = {"optim": {"param_groups": [{"params": listed}, {"params": listed}]}}
    load(values, checkpoint_id=tmp_path / "out")
    assert [sorted(group["params"]) for group in values["optim"]["param_groups"]] == [
        ["norm", "w"],
        ["column", "pos", "void"],
    ]


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("fsdp1_units_w3", "optim_world_size_3_rank_1.pt", "optim_world_size_3_rank_2.pt"),
        ("fsdp1_units_w3", "model_world_size_3_rank_1.pt", "model_world_size_3_rank_2.pt"),
        ("fsdp1_local_w4", "rank_1.pt", "rank_2.pt"),
    ],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_rank_s_file_under_another_rank_s_name_is_refused(
    name: str, one: str, other: str, is_swapped: bool, tmp_path: Path
) -> None:
    """Their keys and shapes are equal."""
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "run"))
    held = (source / one).read_bytes()
    (source / one).write_bytes((source / other).read_bytes())
    if is_swapped:
        (source / other).write_bytes(held)
    with pytest.raises(UcplError, match=f"E465.*{one} was written as {other}"):
        open_checkpoint(source)


@pytest.mark.parametrize("name", ["fsdp1_params_w3", "fsdp1_units_w3"])
def test_ranks_of_two_steps_are_refused(name: str, tmp_path: Path) -> None:
    source = Path(shutil.copytree(FIXTURES / name, tmp_path / "run"))
    path = source / "optim_world_size_3_rank_2.pt"
    held = torch.load(path, weights_only=False)
    for states in held["state"].values():
        states["step"] += 1
    torch.save(held, path)
    with pytest.raises(UcplError, match=r"E456.*rank_2\.pt: ranks do not agree on `step` of"):
        open_checkpoint(source)


@pytest.mark.parametrize("form", ["plain", "transposed", "expanded"])
def test_copies_of_any_form_that_differ_are_refused(form: str, tmp_path: Path) -> None:
    for rank in range(2):
        made = (torch.arange(6.0) + rank).reshape(2, 3)
        made = {"plain": made, "transposed": made.t(), "expanded": made[..., None].expand(2, 3, 4)}[form]
        torch.save({"w": made}, tmp_path / f"model_world_size_2_rank_{rank}.pt")
    with pytest.raises(UcplError, match=r"E700.*copies of `w` differ"):
        open_checkpoint(tmp_path)


def test_a_name_without_a_tensor_is_named(tmp_path: Path) -> None:
    """It has None in the model of every rank."""
    model = torch.nn.Sequential(torch.nn.Linear(6, 4))
    here = alone(tmp_path, {**model.state_dict(), "nothing": None}, trained(model).state_dict())
    account = ucpl.plan(str(here), "plain()").account
    assert account is not None
    found = [(e.fate, e.why) for e in account.entries if any("nothing" in name for name in e.names)]
    assert found == [("not read", "no rank has a tensor there")]


def with_numbers(folder: Path, **more: object) -> None:
    """Save two tensors of one shape, with numbers in the other order."""
    for rank in range(2):
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
            a, b = (torch.arange(10.0).reshape(5, 2) + 100 * n for n in range(2))
            dtensor = [
                DTensor.from_local(
                    chunk(t, 0, rank), mesh, [Shard(0)], shape=t.shape, stride=t.stride(), run_check=False
                )
                for t in (a, b)
            ]
            torch.save({"a": dtensor[0], "b": dtensor[1]}, folder / f"model_world_size_2_rank_{rank}.pt")
            held = {0: {"exp_avg": dtensor[1]}, 1: {"exp_avg": dtensor[0]}}
            groups = [{"lr": 0.5, "params": [0], **more}, {"lr": 0.25, "params": [1]}]
            groups[1] |= {key: ["a"] for key in more}
            torch.save({"state": held, "param_groups": groups}, folder / f"optim_world_size_2_rank_{rank}.pt")
        finally:
            dist.destroy_process_group()


def test_names_that_torch_writes_in_groups_are_those_of_the_numbers(tmp_path: Path) -> None:
    source = tmp_path / "run"
    source.mkdir()
    with_numbers(source)
    with pytest.raises(UcplError, match="E467"):
        ucpl.plan(str(source), "plain()")
    with_numbers(source, param_names=["b"])
    ucpl.convert(source, tmp_path / "plain.pt", "plain()")
    plain = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert [(group["lr"], group["params"]) for group in plain["groups"]] == [(0.5, ["b"]), (0.25, ["a"])]
    for name in "ab":
        assert torch.equal(plain["params"][name]["exp_avg"], plain["params"][name]["weight"]), name


def test_the_schedule_and_the_texts_of_verl_go_along(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    saved(folder)
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text('{"model_type": "odd"}')
    (folder / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 4}')
    for rank in range(RANKS):
        schedule = {"last_epoch": 4, "lr_lambdas": [None], "base_lrs": [0.5 if rank != 2 else 0.75]}
        extra = {"lr_scheduler": schedule, "rng": {"cpu": torch.arange(3) + rank}}
        torch.save(extra, folder / f"extra_state_world_size_{RANKS}_rank_{rank}.pt")
    found = open_checkpoint(folder)
    assert found.state.blobs["lr_scheduler"] == {"last_epoch": 4, "lr_lambdas": [None], "base_lrs": [0.5]}
    assert found.state.blobs["huggingface_files"] == {"config.json": '{"model_type": "odd"}'}
    lead = f"extra_state_world_size_{RANKS}_rank_"
    left = {f"{lead}2.pt: lr_scheduler/base_lrs/0", *(f"{lead}{rank}.pt: rng" for rank in range(RANKS))}
    assert {one.name for one in found.not_read} == left
    made = tmp_path_factory.mktemp("made")
    ucpl.convert(folder, made / "file.pt", "torch_file()")
    assert torch.load(made / "file.pt", weights_only=True)["lr_scheduler"]["base_lrs"] == [0.5]
