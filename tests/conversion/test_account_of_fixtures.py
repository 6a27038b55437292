"""The account of every fixture for every form.

Its items add up, counted here by other means, and moved values are there.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import ucpl
from tests.formats.deepspeed import deepspeed_stand_ins  # noqa: F401  (classes that pickle looks for)
from ucpl.api import Converted, open_checkpoint
from ucpl.extents.account import FATES, Account
from ucpl.extents.train_state import TrainState
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.skipping import skips_optimizer
from ucpl.formats import opening
from ucpl.formats.leaving import DESCRIBING, TEXTS
from ucpl.formats.run_steps import STEPS, steps_of
from ucpl.registry import formats

FIXTURES = Path(os.environ.get("UCPL_CHECKPOINTS", Path(__file__).parents[1] / "fixtures"))
META = tuple(f"meta/{name}" for name in ("run.pt", "plain.pt", "folder", "weights"))
SOURCES = [
    *(f"deepspeed/{path.name}" for path in sorted((FIXTURES / "deepspeed").iterdir()) if path.is_dir()),
    *(f"dcp/{path.name}" for path in sorted((FIXTURES / "dcp").iterdir()) if path.is_dir()),
    *(f"megatron/{path.name}" for path in sorted((FIXTURES / "megatron").iterdir()) if path.is_dir()),
    *(f"odd/{path.name}" for path in sorted((FIXTURES / "odd").iterdir()) if path.is_dir()),
    *(f"universal/{name}/global_step3_universal" for name in ("z1_dp4", "z3_dp4")),
    "accelerate/fsdp",
    "accelerate/state",
    "lightning/step-2.ckpt",
    "trainer/checkpoint-3",
    *META,
    "verl/fsdp2_w3",
    "accelerate/without_engine",
    "trainer/without_engine",
]
TARGETS = (
    "safetensors()",
    "plain()",
    "dcp(fsdp=2)",
    "zero1(dp=2)",
    "zero3(dp=2)",
    "universal()",
    "torch_file()",
    "megatron_core(dp=2)",
    "megatron_legacy()",
)
ALONE = (  # targets that take few sources: a run of the loop, names of the models that the framework has
    ("accelerate/fsdp", "accelerate(dp=2)"),
    ("accelerate/state", "accelerate(dp=2)"),
    ("trainer/checkpoint-3", "trainer(dp=2)"),
    ("accelerate/without_engine", "accelerate(dp=2)"),
    ("trainer/without_engine", "trainer(dp=2)"),
    *((name, "meta(mp=2)") for name in META),
    ("megatron/fsdp_tp2", "megatron_fsdp(dp=2)"),
    ("megatron/dist_adam_tp2", "megatron_fsdp(dp=2)"),
    ("dcp/fsdp2_w4", "safetensors_shards(fsdp=2)"),
    ("verl/fsdp2_w3", "verl(fsdp=2)"),
    ("dcp/fsdp2_w4", "verl(fsdp=3)"),
    ("deepspeed/z1_dp4", "torch_checkpointing(fsdp=3)"),
)
READ_AS = {"verl": "dcp", "torch_checkpointing": "dcp"}  # formats with one reader: that of ranks' files
PAIRS = [*((name, target) for name in SOURCES for target in TARGETS), *ALONE]
# Ends of names of values, which have one key each.
PARTS = {
    " of the module": ("module_extra", "megatron_extra_state"),
    " of the loss scaling": ("loss_scale_config",),
    " of the optimizer": ("megatron_optimizer",),
    " of the ranks' objects": ("sharded_objects",),
}
POINTERS = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")


@pytest.fixture(autouse=True)
def opened_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The headers of a fixture are read once.

    All of its targets are made of them: no pass changes the checkpoint of a reader.
    """
    monkeypatch.setattr(opening, "open_checkpoint", partial(_opened, opening.open_checkpoint))


def _opened(
    read: Callable[..., Checkpoint],
    path: Path,
    order: object = None,
    arguments: Mapping[str, object] | None = None,
    first: str = "",
) -> Checkpoint:
    if not path.is_relative_to(FIXTURES) or order is not None or arguments or skips_optimizer():
        return read(path, order, arguments, first)
    key = (path, first)
    if key not in OPENED:
        OPENED.clear()  # the cases of a fixture are in one run of a process
        OPENED[key] = read(path, order, arguments, first)
    return OPENED[key]


OPENED: dict[tuple[Path, str], Checkpoint] = {}
REFUSALS = tomllib.loads((Path(__file__).parent / "refusals_of_fixtures.toml").read_text())


def expected(verb: str, name: str, target: str) -> str | None:
    """The code of a known refusal of a fixture and a target."""
    known = REFUSALS[verb].get(name, {})
    code = known.get(target, known.get("*"))
    assert code is None or isinstance(code, str)
    return code


def refused(call: Callable[[], object], code: str | None) -> bool:
    """Return True if a call is refused.

    It must be, by this code, where one is known.
    """
    try:
        call()
    except ucpl.UcplError as error:
        assert error.diagnostics[0].code == code, error
        return True
    assert code is None
    return False


def planned(name: str, target: str) -> Account | None:
    """The account; none if the plan is refused as expected."""
    made: list[Account | None] = []
    if refused(lambda: made.append(ucpl.plan(str(FIXTURES / name), target).account), expected("plan", name, target)):
        return None
    assert made[0] is not None
    return made[0]


def names_of(account: Account, kind: str, *fates: str) -> set[str]:
    return {name for e in account.entries if e.kind == kind and e.fate in fates for name in e.names}


def test_every_format_is_a_source_and_a_target() -> None:
    """A new format needs a fixture, and a target that takes one."""
    known = {one.name: one for one in formats().values() if one.name and not one.is_of_a_spec}
    called: dict[str, list[bool]] = {}
    for name, target in PAIRS:
        called.setdefault(target.partition("(")[0], []).append(expected("plan", name, target) is None)
    assert {n for n, one in known.items() if not any(any(called.get(layout, ())) for layout in one.layouts)} == set()
    read = {open_checkpoint(FIXTURES / name).format for name in SOURCES}
    assert {READ_AS.get(name, name) for name in known} - read == set()


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_the_items_add_up_and_what_is_moved_is_there(name: str, target: str, tmp_path: Path) -> None:
    made: list[Converted] = []
    code = expected("plan", name, target) or expected("convert", name, target)
    refused(
        lambda: made.append(ucpl.convert(FIXTURES / name, tmp_path / "x", target, allow_globals=["*"])),
        code,
    )
    account = made[0].plan.account if made else planned(name, target)
    if account is None:
        assert not made
        return
    source = open_checkpoint(FIXTURES / name)
    demand_sums(account, source)
    if made:
        demand_moved(account, source.state, open_checkpoint(tmp_path / "x").state)


def demand_sums(account: Account, source: Checkpoint) -> None:
    """Files are counted on the disk, tensors in the model.

    With a weight, and a state for each that a tensor has.
    """
    assert account.items == account.count(*FATES)
    states = sum(len(t.states) for t in source.state.tensors)
    counted = sum(e.count for e in account.entries if e.kind.startswith("tensor"))
    assert states <= counted
    assert counted <= states + len(source.state.tensors) or source.format == "megatron_core"  # stacks may be split
    assert sum(e.count for e in account.entries if e.kind == "client_state") >= len(source.state.carried)
    top = source.top
    found = [path for path in top.rglob("*") if path.is_file() and path.name not in POINTERS] if top.is_dir() else [top]
    folded = {n for n in names_of(account, "file", "not read") if n.endswith("/")}  # folders that nobody looks into
    files = [p for p in found if not any(f"/{n}" in f"/{p.relative_to(top)}" for n in folded)] if folded else found
    assert sum(e.count for e in account.entries if e.kind == "file") == len(files) + len(folded)


def demand_moved(account: Account, source: TrainState, there: TrainState) -> None:
    """Compare the target's own reader with the account's moved values."""
    dropped = names_of(account, "value", "dropped")
    dropped |= {blob for words, some in PARTS.items() if any(n.endswith(words) for n in dropped) for blob in some}
    kept = {key for key in source.blobs if key not in DESCRIBING and key not in (TEXTS, "empty_tensors")} - dropped
    again: set[object] = {*there.blobs, *there.carried}
    again |= {STEPS} if steps_of(there) == source.blobs.get(STEPS) else set()  # of Accelerate's optimizer
    again |= {"loss_scale_config"} if "loss_scaler" in again else set()  # ZeRO's object is made of its numbers
    assert {key for key in kept if key not in again} - {"megatron_fsdp_rng"} == set()
    gone = names_of(account, "client_state", "dropped")
    arrived = {*map(str, there.carried), "rng_state"} | ({"lr_sched"} if "lr_scheduler" in there.blobs else set())
    assert {str(key) for key in source.carried} - gone <= arrived
    groups = {g.name for g in source.groups} - names_of(account, "group", "dropped")
    assert not groups or there.groups
    hypers = {key for g in source.groups if g.name in groups for key in g.hyper}
    assert hypers <= {key for g in there.groups for key in g.hyper}


# ---- planted by chance ------------------------------------------------------------------------------------------------

NAMES = st.text("abcdefgh_", min_size=1, max_size=8).map(lambda text: f"planted_{text}")
KINDS = ("file", "text", "optimizer", "folder", "tensor")


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(name=NAMES, kind=st.sampled_from(KINDS), target=st.sampled_from(TARGETS[:7]))
def test_what_is_planted_in_a_folder_of_weights_is_kept_named_or_refused(
    tmp_path_factory: pytest.TempPathFactory, name: str, kind: str, target: str
) -> None:
    folder = tmp_path_factory.mktemp("planted")
    weights = {"w": torch.ones(4, 3), **({name: torch.ones(3)} if kind == "tensor" else {})}
    (folder / "run").mkdir()
    save_file(weights, folder / "run" / "model.safetensors")
    match kind:
        case "file":
            (folder / "run" / f"{name}.bin").write_bytes(b"1")
        case "text":
            (folder / "run" / f"{name}.json").write_text("{}")
        case "optimizer":
            (folder / "run" / f"optimizer_{name}.pt").write_bytes(b"1")
        case "folder":
            (folder / "run" / name / "deep").mkdir(parents=True)
            (folder / "run" / name / "deep" / "file").write_bytes(b"1")
    try:
        made = ucpl.convert(folder / "run", folder / "x", target)
    except ucpl.UcplError as error:
        assert kind == "optimizer" and target != "safetensors()", error
        return
    account = made.plan.account
    assert account is not None
    said = any(name in one for e in account.entries for one in e.names)
    written = [file for file in (folder / "x").rglob("*") if file.is_file()] or [folder / "x"]
    is_kept = any(name in file.as_posix() or name.encode() in file.read_bytes() for file in written)
    assert said or is_kept
    if target == "safetensors()" and kind == "tensor":
        assert name in load_file(folder / "x" / "model.safetensors")
