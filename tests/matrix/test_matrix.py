"""Two models from each form of checkpoint to others, at other degrees.

The results are those of docs/MATRIX.md.

Megatron-Core wrote both, bf16 with masters, Adam's moments and steps: a dense one, which goes from each form to each, and one
with experts, and every form is a source twice, and a target twice. Each cell is one conversion, its files are watched and
its target is read once more. `UCPL_GOLDEN=write` writes the page.
"""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import ucpl
from tests.matrix.opened import Opened, watching
from ucpl.api import Converted
from ucpl.errors import UcplError

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "MATRIX.md"
MEGATRON = HERE.parent / "fixtures" / "megatron"
CUT = f"{HERE}/cut.ucpl"


class Form(NamedTuple):
    """The calls for the dense model's source and target.

    The same of the model with experts, if it goes to this form.
    """

    source: str
    target: str
    moe_source: str = ""
    moe_target: str = ""
    read: str = ""  # the spec of a target's cuts over tp, if no file has them
    run: str = ""  # the loop whose own files a target needs


BIN = 'file="pytorch_model.bin", model="", wrap=""'
CKPT = 'file="last.ckpt", model="state_dict", optimizer="optimizer_states/0", scheduler="lr_schedulers", wrap="net."'
LIGHTNING = 'torch_file(wrap="net.")'
STAGED = "ZeRO-1, TP x PP"  # under the names that a PipelineModule gives its layers
FORMS = {
    "ZeRO-1": Form("zero1(dp=2)", "zero1(dp=3, tp=1)", "zero1(dp=2)", "zero1(dp=5, tp=1)"),
    "ZeRO-3": Form("zero3(dp=2)", "zero3(dp=3, tp=1)", "zero3(dp=4)", "zero3(dp=3, tp=1)"),
    "ZeRO-1, TP": Form(
        f"{CUT}:zero1_tp(dp=1, tp=2)",
        f"{CUT}:zero1_tp(dp=3, tp=2)",
        f"{CUT}:zero1_tp(dp=3, tp=2)",
        f"{CUT}:zero1_tp(dp=1, tp=2)",
    ),
    STAGED: Form(
        f"{CUT}:zero1_tp(dp=2, tp=2, stages=[3, 2])",
        f"{CUT}:zero1_tp(dp=3, tp=2, stages=[2, 3])",
        f"{CUT}:zero1_tp(dp=3, tp=1, stages=[2, 3])",
        f"{CUT}:zero1_tp(dp=2, tp=2, stages=[2, 3])",
    ),
    "universal": Form("universal()", "universal()", "universal()", "universal()"),
    "DCP, FSDP2": Form("dcp(fsdp=2)", "dcp(fsdp=3, tp=1)", "dcp(fsdp=3)", "dcp(fsdp=2, tp=1)"),
    "DCP, FSDP2 x TP": Form(
        f"{CUT}:dcp_tp(fsdp=2, tp=2)",
        f"{CUT}:dcp_tp(fsdp=3, tp=2)",
        f"{CUT}:dcp_tp(fsdp=1, tp=2)",
        f"{CUT}:dcp_tp(fsdp=2, tp=4)",
        f"{CUT}:dcp_tp(fsdp=3, tp=2)",
    ),
    "torch_dist": Form("megatron_core(tp=2)", "megatron_core(pp=3)", "megatron_core(tp=2)", "megatron_core(tp=4)"),
    "Megatron legacy": Form(
        "megatron_legacy(tp=2)", "megatron_legacy(pp=2)", "megatron_legacy(tp=2, ep=2)", "megatron_legacy(tp=1, ep=4)"
    ),
    "Hugging Face": Form(
        "safetensors()", 'safetensors(shard="20KB")', 'safetensors(shard="9KB")', 'safetensors(shard="5KB")'
    ),
    "one torch file": Form("torch_file()", "torch_file()", "torch_file()", "torch_file()"),
    "torch file, compiled": Form('torch_file(wrap="_orig_mod.")', 'torch_file(wrap="_orig_mod.")'),
    "torch file, DDP": Form('torch_file(wrap="module.")', 'torch_file(wrap="module.")'),
    "pytorch_model.bin": Form(f"torch_file({BIN})", f"torch_file({BIN})"),
    "Trainer, DDP": Form("trainer(dp=2)", "trainer(dp=3)", run="trainer"),
    "Accelerate, DDP": Form("accelerate(dp=2)", "accelerate(dp=3)", run="accelerate"),
    "Lightning .ckpt": Form(f"torch_file({CKPT})", f"torch_file({CKPT})", read=LIGHTNING, run="lightning"),
    "plain": Form("plain()", "plain()", "plain()", "plain()"),
}
WEIGHTS = ("Hugging Face", "pytorch_model.bin")  # forms without an optimizer
NO_RUN = "no run"
LEGACY = "megatron_legacy(tp=2, pp=1)"  # layers are dealt by Megatron's names, and a PipelineModule's are others
STEPS = (1, 4)  # with experts, from each form to those that stand so far behind it
States = dict[str, dict[str, torch.Tensor]]
Names = Callable[[str], str]


def pairs() -> list[tuple[str, str]]:
    """Of the model with experts.

    Each form is a source twice, and a target twice.
    """
    forms = [name for name, form in FORMS.items() if form.moe_source]
    return [(one, forms[(i + step) % len(forms)]) for i, one in enumerate(forms) for step in STEPS]


# ---- models ------------------------------------------------------------------------------------------------------------


def staged(name: str) -> str:
    """As a PipelineModule would call it.

    The embedding is layer 0, behind the blocks are a norm and the head.
    """
    name = name.replace("embedding.word", "0.word").replace("decoder.final_layernorm", "3.final_layernorm")
    name = re.sub(r"^decoder\.layers\.(\d+)\.", lambda found: f"{int(found[1]) + 1}.", name)
    return f"4.{name}" if name.startswith("output_layer") else name


def parameters(folder: Path, made: Path, read: str = "") -> States:
    """The content of a folder, with buffers.

    read: a spec of the cuts of tensors, if no file has them.
    """
    if (folder / "pytorch_model.bin").exists():
        held = torch.load(folder / "pytorch_model.bin", weights_only=True)
        return {name: {"weight": value} for name, value in held.items()}
    if any(folder.glob("*.safetensors")) and not any(folder.glob("optimizer.*")):
        return {
            name: {"weight": value} for file in folder.glob("*.safetensors") for name, value in load_file(file).items()
        }
    if not (folder / "plain.pt").exists():
        if read:
            ucpl.convert(folder, made, to="plain()", layout=read)
        else:
            ucpl.convert(folder, made, to="plain()")
        folder = made
    held = torch.load(folder / "plain.pt", weights_only=True)
    shutil.rmtree(made, ignore_errors=True)
    out = {name: {s: torch.as_tensor(v) for s, v in states.items()} for name, states in held["params"].items()}
    return out | {name: {"weight": value} for name, value in held["buffers"].items()}


def _renamed(folder: Path, made: Path, layers: int = 2) -> Path:
    """The same under a PipelineModule's names. layers.

    As many as it has, or one more, whose values are others then.
    """
    ucpl.convert(folder, made, to="plain()")
    held = torch.load(made / "plain.pt", weights_only=True)

    def names(name: str) -> list[str]:
        more = [name.replace("layers.0.", "layers.1.")] if layers == 1 and "layers.0." in name else []
        return [staged(one) for one in (name, *more)]

    def other(value: torch.Tensor | float, number: int) -> torch.Tensor | float:
        return value.flip(0) if number and isinstance(value, torch.Tensor) else value

    held["params"] = {
        one: {state: other(value, i) for state, value in states.items()}
        for name, states in held["params"].items()
        for i, one in enumerate(names(name))
    }
    held["buffers"] = {one: other(t, i) for name, t in held["buffers"].items() for i, one in enumerate(names(name))}
    for group in held["groups"]:
        mine = [one for name in group["params"] for one in names(name)]
        group["params"] = sorted(mine, key=lambda name: int(name.partition(".")[0]))  # a pipeline's order
    shutil.rmtree(made)
    made.mkdir()
    torch.save(held, made / "plain.pt")
    return made


@cache
def _origins(base: Path) -> dict[str, tuple[Path, States]]:
    """The models with a tensor per layer and expert, and their values."""
    ucpl.convert(MEGATRON / "dist_stacked_tp2_pp2_fully", base / "dense", to="megatron_legacy()")
    dense = parameters(base / "dense", base / "truth")
    moe = shutil.copytree(MEGATRON / "legacy_moe", base / "moe")
    staged_moe = _renamed(moe, base / "staged moe", layers=1)
    out = {
        "dense": (base / "dense", dense),
        STAGED: (_renamed(base / "dense", base / "staged"), {staged(name): held for name, held in dense.items()}),
        "moe": (moe, parameters(moe, base / "truth")),
        f"moe, {STAGED}": (staged_moe, parameters(staged_moe, base / "truth")),
    }
    ucpl.convert(base / "dense", base / "plain", to="plain()")
    for names, folder in (("dense", base / "plain"), (STAGED, base / "staged")):
        for loop in filter(None, (form.run for form in FORMS.values())):
            out[f"{names}, {loop}"] = (run_of(loop, folder, base / f"{loop} of {names}"), in_fp32(out[names][1]))
    return out


# ---- runs of loops -----------------------------------------------------------------------------------------------------


def in_fp32(wanted: States) -> States:
    """The model of loops in fp32: its weights are the masters."""
    return {
        name: {"weight": held["fp32"], **{state: one for state, one in held.items() if state not in ("fp32", "weight")}}
        for name, held in wanted.items()
    }


def run_of(loop: str, plain: Path, folder: Path) -> Path:
    """A run of a loop with two ranks, written by torch.

    The keys and files are those of tests/interop/strategies_job.py and lightning_job.py.
    """
    held = torch.load(plain / "plain.pt", weights_only=True)
    folder.mkdir()
    lead = "net." if loop == "lightning" else ""
    weights = {lead + name: states["fp32"] for name, states in held["params"].items()}
    names = [name for group in held["groups"] for name in group["params"]]
    states = {
        i: {
            state: torch.as_tensor(one)
            for state, one in held["params"][name].items()
            if state not in ("weight", "fp32")
        }
        for i, name in enumerate(names)
    }
    groups = [
        {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        | {
            "initial_lr": 0.01,
            "param_names": [lead + name for name in group["params"]],
            "params": [*map(names.index, group["params"])],
        }
        for group in held["groups"]
    ]
    optimizer = {"state": states, "param_groups": groups}
    schedule = {"base_lrs": [0.01, 0.01], "last_epoch": 1, "_step_count": 2, "_last_lr": [0.005, 0.005]}
    if loop == "lightning":
        counted = {"pytorch-lightning_version": "2.6.6", "epoch": 0, "global_step": 1}
        rest = {"loops": {"fit_loop": {}}, "optimizer_states": [optimizer], "lr_schedulers": [schedule]}
        torch.save({**counted, "state_dict": weights, **rest}, folder / "last.ckpt")
        return folder
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    end = ".pt" if loop == "trainer" else ".bin"
    torch.save(optimizer, folder / f"optimizer{end}")
    torch.save(schedule, folder / f"scheduler{end}")
    if loop == "trainer":
        (folder / "trainer_state.json").write_text('{"global_step": 1}')
    for rank in range(2):
        if loop == "trainer":
            torch.save({"cpu": torch.arange(4, dtype=torch.uint8)}, folder / f"rng_state_{rank}.pth")
        else:
            (folder / f"random_states_{rank}.pkl").write_bytes(pickle.dumps({"step": 0}))
    return folder


def is_of_run(folder: Path, loop: str) -> bool:
    """Test for the files or keys of a loop that resumes."""
    if loop != "lightning":
        return any(folder.glob("scheduler.*")) and len([*folder.glob("r*_state*_?.p*")]) == 3
    held = torch.load(folder / "last.ckpt", weights_only=False)
    assert all(name.startswith("net.") for name in held["state_dict"])
    return "loops" in held and held["lr_schedulers"][0]["last_epoch"] == 1


@pytest.fixture(scope="session")
def origins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, States]]:
    return _origins(tmp_path_factory.mktemp("matrix"))


# ---- cells -------------------------------------------------------------------------------------------------------------


def converted(source: Path, target: Path, call: str) -> Converted:
    """One conversion that opens only files of source and target.

    Other files are no parts of checkpoints.
    """
    layout = LIGHTNING if (source / "last.ckpt").exists() else None
    with watching() as seen:
        made = ucpl.convert(source, target, to=call, layout=layout)
    demand_no_other(seen, source, target)
    return made


def demand_no_other(seen: Opened, source: Path, target: Path) -> None:
    """Files of checkpoints that were read are the source's.

    Files that were written are the target's.
    """
    work = target.parent / f".{target.name}.ucpl-work"
    kept = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
    assert any(path.is_relative_to(source) for path in seen.read), "the trace sees the source"
    for path in seen.read | seen.written | seen.changed:
        known = any(path.is_relative_to(one) for one in (source, target, work, *seen.ours))
        assert known or path.name == f".{target.name}.ucpl-lock", f"{path} is of neither"
    for path in seen.written:
        assert not path.is_relative_to(source), f"{path} was written"
        if path.is_relative_to(work / "tree"):
            assert path.relative_to(work / "tree") in kept, f"{path} lay between"
        elif path.is_relative_to(work):
            assert path.name in ("journal", "journal.new"), f"{path} lay between"
    assert {work / "tree" / one for one in kept} <= seen.written, "the trace sees the target"


def arrived(found: States, wanted: States, source: str) -> bool:
    """The result: all of a model is there, each value equal.

    Else the weights are, with masters made of them at most.
    """
    assert found.keys() == wanted.keys()
    states = {state for held in found.values() for state in held}
    for name, held in found.items():
        for state, tensor in held.items():
            is_made = state == "fp32" and state not in wanted[name]  # of the weight
            is_made |= state == "fp32" and source in WEIGHTS
            true = wanted[name]["weight"].float() if is_made else wanted[name][state]
            assert torch.equal(tensor, true), (name, state)
    if states - {"fp32"} == {"weight"}:
        return False
    made = set() if any("fp32" in held for held in wanted.values()) else {"fp32"}
    assert all(held.keys() - made == wanted[name].keys() for name, held in found.items()), states
    return True


def left_out(made: Converted) -> set[tuple[str, str]]:
    """(state, tensor) of the optimizer's that the verb says are left out."""
    told = [text.partition(": ")[0].partition(" of ") for text in made.plan.dropped]
    assert len(told) == len(set(told))
    return {(state, tensor) for state, _, tensor in told if state != "weight"}


def cell(made: Converted, found: States, wanted: States, source: str) -> str:
    """The text of a cell of the page.

    The arrived values, and the number of left-out values of states.
    """
    is_all = arrived(found, wanted, source)
    told = {one for one in left_out(made) if one[0] in wanted[one[1]]}  # masters of fp32 weights are these weights
    if is_all or source in WEIGHTS:  # nothing was there to be left out
        assert not told, told
        return "all" if is_all else "weights"
    held = {(state, name) for name, states in wanted.items() for state in states if state != "weight"}
    if source == "ZeRO-3":  # which stores no weights: they are rounded from the masters, and the plan reports it
        held = {(state, name) for state, name in held if state != "fp32"}
        assert any("weight" in text and "fp32" in text for text in made.plan.derived)
    assert told == held
    return f"weights; {len(told)} left out"


def page(line: str, begins: str) -> None:
    """The line is the page's, or is made so."""
    if os.environ.get("UCPL_GOLDEN") == "write":
        lines = PAGE.read_text(encoding="utf-8").splitlines()
        kept = [line if part.startswith(begins) else part for part in lines]
        PAGE.write_text("\n".join(kept if line in kept else [*kept, line]) + "\n", encoding="utf-8")
    assert line in PAGE.read_text(encoding="utf-8").splitlines()


def of_run(folder: Path, names: str, form: Form, wanted: States, source: str) -> str:
    """The cell of a target with a loop's own files."""
    try:
        made = converted(folder / names, folder / "target", form.target)
    except UcplError as error:
        assert error.diagnostics[0].code == "E471"
        return NO_RUN
    text = cell(made, parameters(folder / "target", folder / "plain", form.read), wanted, source)
    has_run = is_of_run(folder / "target", form.run)
    shutil.rmtree(folder / "target")
    return text if has_run else NO_RUN


@pytest.mark.parametrize("source", FORMS)
def test_a_form_goes_to_each_other(tmp_path: Path, origins: dict[str, tuple[Path, States]], source: str) -> None:
    row = []
    for target, form in FORMS.items():
        names = STAGED if STAGED in (source, target) else "dense"
        if loop := form.run or FORMS[source].run:
            names = f"{names}, {FORMS[source].run or loop}"
        if not (tmp_path / names).exists():
            converted(origins[names][0], tmp_path / names, FORMS[source].source)
        call = LEGACY if source == STAGED and target == "Megatron legacy" else form.target
        if form.run:
            row.append(of_run(tmp_path, names, form, origins[names][1], source))
            continue
        made = converted(tmp_path / names, tmp_path / "target", call)
        found = parameters(tmp_path / "target", tmp_path / "plain", form.read)
        row.append(cell(made, found, origins[names][1], source))
        shutil.rmtree(tmp_path / "target")
    page("| " + " | ".join((source, *row)) + " |", f"| {source} |")


@pytest.mark.parametrize("source", dict.fromkeys(source for source, _ in pairs()))
def test_a_form_with_experts_goes_to_others(
    tmp_path: Path, origins: dict[str, tuple[Path, States]], source: str
) -> None:
    row = []
    for target in (target for one, target in pairs() if one == source):
        form = FORMS[target]
        names = f"moe, {STAGED}" if STAGED in (source, target) else "moe"
        folder, wanted = origins[names]
        if not (tmp_path / names).exists():
            ucpl.convert(folder, tmp_path / names, to=FORMS[source].moe_source)
        made = converted(tmp_path / names, tmp_path / "target", form.moe_target)
        read = form.read and form.moe_target  # its degrees are those of this model
        found = parameters(tmp_path / "target", tmp_path / "plain", read)
        row.append(f"{target}: {cell(made, found, wanted, source)}")
        shutil.rmtree(tmp_path / "target")
    page("- " + " → ".join((source, " · ".join(row))), f"- {source} →")


def test_the_page_has_each_form_and_nothing_else() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert rows[0] == "| from \\ to | " + " | ".join(FORMS) + " |"
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]] == [*FORMS]
    assert [line.split(" → ")[0].removeprefix("- ") for line in lines if line.startswith("- ")] == [
        name for name, form in FORMS.items() if form.moe_source
    ]
    for form in (name for name, form in FORMS.items() if form.moe_source):
        assert sum(source == form for source, _ in pairs()) >= 2
        assert sum(target == form for _, target in pairs()) >= 2
