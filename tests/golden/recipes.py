"""The recipes of the cases of errors/.

A folder with something wrong in it, and the command that must say so.

A recipe gets an empty folder, makes its input there, and returns the command's arguments; paths in them are relative to
the folder. `source` (or the files of `read_only`) must be the same afterwards, and `target` must not be there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray

from tests.cli.command import FIXTURES, good
from tests.formats.huggingface.folders import llama_config, llama_shapes, save, tensors_of
from ucpl.resources import spec_text

Recipe = Callable[[Path], list[str]]
Logits = NDArray[np.float64]


@frozen
class Case:
    """A recipe, and the conditions afterwards."""

    name: str
    make: Recipe
    leaves_target: bool = False  # the target was there before, and stays as it was
    forward: Callable[[Path], Logits] | None = None  # the result of a config's class, if it is asked


CASES: dict[str, Case] = {}
STEP = "source/global_step3"
MODEL = f"{STEP}/mp_rank_00_model_states.pt"
CONVERT = ["convert", "source", "target", "--to", "zero1(dp=3)"]


def case(make: Recipe) -> Recipe:
    CASES[make.__name__] = Case(make.__name__, make)
    return make


def case_that_keeps_its_target(make: Recipe) -> Recipe:
    CASES[make.__name__] = Case(make.__name__, make, leaves_target=True)
    return make


def source(folder: Path, name: str = "z1_dp4") -> Path:
    """A copy of a real checkpoint."""
    shutil.copytree(FIXTURES / name, folder / "source")
    (folder / "source" / "truth.pt").unlink(missing_ok=True)
    return folder / "source"


def numbered(folder: Path) -> None:
    """A checkpoint without ZeRO, of two groups, with unnamed parameters."""
    module = {"a.weight": torch.ones(2, 3), "a.bias": torch.ones(3), "b.bias": torch.ones(3)}
    state = {i: {"exp_avg": torch.zeros(2, 3) if i == 0 else torch.zeros(3)} for i in range(2)}
    held = {"module": module, "buffer_names": [], "dp_world_size": 1, "mp_world_size": 1, "ds_version": "0.19.8"}
    held["optimizer"] = {"state": state, "param_groups": [{"lr": 0.1, "params": [i]} for i in range(2)]}
    (folder / STEP).mkdir(parents=True)
    torch.save(held, folder / MODEL)
    (folder / "source" / "latest").write_text("global_step3")


def inferred(folder: Path, *changes: tuple[str, str]) -> str:
    """The source's .ucpl with some changed text, as a LAYOUT."""
    good("infer", folder / "source", "-o", folder / "spec.ucpl")
    text = (folder / "spec.ucpl").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    (folder / "spec.ucpl").write_text(text)
    return "spec.ucpl:stored()"


def without_line(folder: Path, start: str) -> str:
    """The source's .ucpl without one line, as a LAYOUT."""
    inferred(folder)
    lines = (folder / "spec.ucpl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not re.match(start, line.lstrip())]
    assert len(kept) == len(lines) - 1, (start, len(lines) - len(kept))
    (folder / "spec.ucpl").write_text("".join(kept))
    return "spec.ucpl:stored()"


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """The file of weights, with a value changed by torch."""
    value = torch.load(folder / MODEL, weights_only=False)
    change(value)
    torch.save(value, folder / MODEL)


def flip(path: Path, member: str, byte: int) -> None:
    """One bit of a member's payload, its CRC left as it was."""
    with zipfile.ZipFile(path) as archive:
        info = next(i for i in archive.infolist() if i.filename.endswith(member))
    raw = bytearray(path.read_bytes())
    names = int.from_bytes(raw[info.header_offset + 26 : info.header_offset + 28], "little")
    extra = int.from_bytes(raw[info.header_offset + 28 : info.header_offset + 30], "little")
    raw[info.header_offset + 30 + names + extra + byte] ^= 0x10
    path.write_bytes(raw)


class Runs:
    """A value whose pickle runs a command when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.marker}",))


class Tracker:
    """An object of the user's own in client_state."""

    def __init__(self) -> None:
        self.seen = 3


Tracker.__module__, Tracker.__qualname__ = "my_project.tracking", "Tracker"

# ---- the command line ------------------------------------------------------------------------------------------------


@case
def unknown_verb(folder: Path) -> list[str]:
    return ["covert", "source", "target"]


@case
def missing_arguments(folder: Path) -> list[str]:
    return ["convert", "source"]


@case
def misspelt_option(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--memroy", "1G"]


@case
def bad_memory(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--memory", "lots"]


@case
def too_little_memory(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--memory", "64K"]


@case
def bad_workers(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--workers", "none"]


@case
def unknown_code(folder: Path) -> list[str]:
    return ["explain", "E999"]


@case
def unknown_format(folder: Path) -> list[str]:
    return ["formats", "safetensor-shards"]


@case
def config_that_is_a_device(folder: Path) -> list[str]:
    return ["check", "spec.ucpl", "--config", "/dev/zero"]


@case
def unknown_layout(folder: Path) -> list[str]:
    source(folder)
    return ["convert", "source", "target", "--to", "zeor1(dp=3)"]


@case
def numbers_that_may_be_several_parameters(folder: Path) -> list[str]:
    """Trained in fp32 without ZeRO.

    Two biases of one length, one of them frozen.
    """
    numbered(folder)
    return CONVERT


@case
def order_that_names_no_parameter(folder: Path) -> list[str]:
    numbered(folder)
    (folder / "names.json").write_text('[["a.weight"], ["norm.bias"]]')
    return [*CONVERT, "--from", 'zero0(order="names.json")']


@case
def unknown_parameter(folder: Path) -> list[str]:
    source(folder)
    return ["convert", "source", "target", "--to", "zero1(pd=3)"]


@case
def unreadable_call(folder: Path) -> list[str]:
    source(folder)
    return ["convert", "source", "target", "--to", "zero1(dp=3"]


@case
def layout_without_a_model(folder: Path) -> list[str]:
    return ["plan", "--from", "zero1(dp=2)", "--to", "zero1(dp=3)"]


@case
def half_a_plan(folder: Path) -> list[str]:
    return ["plan", "--to", "zero1(dp=3)"]


@case
def drop_of_nothing(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--drop", "exp_avg_square"]


@case
def glob_of_parameters_that_there_are_not(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--freeze", "encoder.*"]


@case
def half_of_a_tie_dropped(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--drop", "wte.weight"]


@case
def freezing_a_buffer(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--freeze", "calls"]


@case
def training_in_a_group_that_there_is_not(folder: Path) -> list[str]:
    source(folder, "z2_dp3_frozen")
    return [*CONVERT, "--train", "wpe.weight=2"]


@case
def freezing_all_that_is_trained(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--freeze", "*"]


@case
def fill_of_nothing(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--fill", "exp_awg=0"]


@case
def fill_of_a_master(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--fill", "state fp32=0"]


def gate_less_up(folder: Path) -> Logits:
    """In place of a class.

    Integers that distinguish a gate from an up, and that no processor rounds.
    """
    held = tensors_of(folder)
    less = held["model.layers.0.mlp.gate_proj.weight"] - held["model.layers.0.mlp.up_proj.weight"]
    return less.double().numpy()


def contradicted_by_a_class(folder: Path) -> list[str]:
    config = llama_config(num_hidden_layers=1)
    tensors = {name: torch.full(shape, float(n)) for n, (name, shape) in enumerate(llama_shapes(config).items())}
    save(folder / "source", tensors, config)
    line = re.compile(r'gate, up +(= f h +as )"\{mlp\}\{name\}_proj')
    turned = r'gate \1"{mlp}up_proj.weight"\n  up \1"{mlp}gate_proj'
    (folder / "decoder.ucpl").write_text(line.sub(turned, spec_text("decoder.ucpl")))
    (folder / "mine.ucpl").write_text(spec_text("llama.ucpl"))
    return ["verify", "source", "--from", "mine.ucpl:hf()"]


CASES["contradicted_by_a_class"] = Case("contradicted_by_a_class", contradicted_by_a_class, forward=gate_less_up)


# ---- texts -----------------------------------------------------------------------------------------------------------


@case
def missing_text(folder: Path) -> list[str]:
    return ["check", "nowhere.ucpl"]


@case
def text_that_does_not_parse(folder: Path) -> list[str]:
    (folder / "spec.ucpl").write_text("ucpl 1\n\nmodel m {\n  w : 4 8\n  b : 4 |\n}\n")
    return ["check", "spec.ucpl"]


@case
def uneven_cut(folder: Path) -> list[str]:
    text = """ucpl 1

model m {
  dim v = 67, h = 8
  w : v h dtype f32
}

layout whole() of m {
  file weights = torch "whole.pt"
  w = v h as "w"
}

layout cut(tp) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  w = v@tp h as "w"
}

plan grow = whole() -> cut(tp = 3)
"""
    (folder / "spec.ucpl").write_text(text)
    return ["plan", "spec.ucpl", "grow"]


def checked(folder: Path, *edit: str) -> list[str]:
    """`check` of a right spec with a part of its text changed."""
    text = """ucpl 1

model m {
  dim v = 6, h = 8
  w : v h dtype f32
}

layout cut(tp) of m {
  mesh tp
  file weights = torch "rank_{tp}.pt"
  w = v@tp h  as "w"
}
"""
    for before, after in zip(edit[::2], edit[1::2], strict=True):
        assert before in text, before
        text = text.replace(before, after)
    (folder / "spec.ucpl").write_text(text)
    return ["check", "spec.ucpl"]


def checked_model(folder: Path, model: str, layout: str = '  * = ... as "{name}"\n', *more: str) -> list[str]:
    """A text with a model and a layout, and its check command."""
    text = f'ucpl 1\n\nmodel m {{\n{model}}}\n\nlayout x() of m {{\n  file weights = torch "a.pt"\n{layout}}}\n'
    (folder / "spec.ucpl").write_text(text + "".join(more))
    return ["check", "spec.ucpl"]


@case
def state_that_the_model_lacks(folder: Path) -> list[str]:
    return checked(folder, '  w = v@tp h  as "w"', '  w = v@tp h  as "w"\n  state momentum = like  as "m"')


@case
def setting_that_nobody_reads(folder: Path) -> list[str]:
    return checked(folder, "  mesh tp", "  mesh tp\n  framework torch(shards = 2)")


@case
def state_derived_from_itself(folder: Path) -> list[str]:
    return checked(folder, "  mesh tp", "  mesh tp\n  derive weight from fp32\n  derive fp32 from weight")


@case
def none_of_nothing(folder: Path) -> list[str]:
    return checked(folder, "  mesh tp", "  mesh tp\n  ww = none")


@case
def rest_twice(folder: Path) -> list[str]:
    return checked(folder, "w = v@tp h ", "w = v@tp ... ... ")


@case
def file_without_its_rank(folder: Path) -> list[str]:
    return checked(folder, "rank_{tp}.pt", "ranks.pt")


@case
def half_of_a_cut_tensor(folder: Path) -> list[str]:
    return checked(folder, "h  as", "h  at tp[0]  as")


@case
def dtype_of_torch(folder: Path) -> list[str]:
    return checked(folder, "dtype f32", "dtype float32")


def held_against(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> list[str]:
    """A spec's output, and a checkpoint that differs in one thing."""
    text = """ucpl 1

model m {
  dim r = 4, c = 3
  w : r c
  b : c
}

layout x() of m {
  framework torch()
  file weights = torch "w.pt"
  w = r c  as "w"
  b = c    as "b"
}
"""
    (folder / "spec.ucpl").write_text(text)
    value = {"w": torch.arange(12.0).view(4, 3), "b": torch.arange(3.0) + 100}
    for name in ("mine", "genuine"):
        (folder / name).mkdir()
        torch.save(value, folder / name / "w.pt")
        if name == "mine":
            change(value)
    return ["verify", "mine", "--from", "spec.ucpl:x()", "--against", "genuine"]


@case
def genuine_of_another_order(folder: Path) -> list[str]:
    return held_against(folder, lambda value: value.update(w=torch.arange(12.0).view(4, 3)[[2, 3, 0, 1]]))


@case
def genuine_without_a_tensor(folder: Path) -> list[str]:
    return held_against(folder, lambda value: value.pop("b"))


@case
def genuine_with_more(folder: Path) -> list[str]:
    return held_against(folder, lambda value: value.update(extra=torch.ones(2)))


@case
def genuine_of_another_shape(folder: Path) -> list[str]:
    return held_against(folder, lambda value: value.update(w=torch.zeros(4, 4)))


@case
def genuine_of_another_dtype(folder: Path) -> list[str]:
    return held_against(folder, lambda value: value.update(b=value["b"].bfloat16()))


@case
def layer_that_there_is_not(folder: Path) -> list[str]:
    kinds = '  let kinds = ["mamba", "attention", "mamba"]\n'
    return checked_model(folder, kinds + '  dim l = 2, h = 4\n  mixer : l[where(kinds, "mamba")] h\n')


@case
def nothing_to_take_back(folder: Path) -> list[str]:
    more = "\nmodel less extends m() {\n  haed : none\n}\n\nlayout y() of less extends x() {\n}\n"
    checked_model(folder, "  head : 4\n")
    with open(folder / "spec.ucpl", "a") as file:
        file.write(more)
    return ["check", "spec.ucpl"]


@case
def one_model_with_different_arguments(folder: Path) -> list[str]:
    text = """ucpl 1

model gpt(layers = 2, window = 8) {
  dim l = layers
  w : l dtype f32
}

layout one() of gpt {
  file weights = torch "a.pt"
  w = l as "w"
}

layout two() of gpt(window = 16) extends one() {
}

plan p = one() -> two()
"""
    (folder / "spec.ucpl").write_text(text)
    return ["plan", "spec.ucpl", "p"]


@case
def two_rules_for_one_index(folder: Path) -> list[str]:
    rules = "  mesh pp\n  let pp = 1\n  index l = l@pp when pp > 0\n  index l = l@pp[4] when pp == 1\n"
    return checked_model(folder, "  dim l = 4\n  w : l\n", rules + '  w[l] = () as "{l}"\n')


@case
def model_on_ranks(folder: Path) -> list[str]:
    more = "\nmodel pair {\n  use m() as a at pp[0]\n}\n\nlayout y(pp) of pair {\n  mesh pp\n}\n"
    return checked_model(folder, "  w : 4\n", '  * = ... as "{name}"\n', more)


@case
def layers_of_different_sizes_stacked(folder: Path) -> list[str]:
    return checked_model(folder, "  dim l = 2, f = [2, 4] by l\n  up : l f\n", '  up = l f as "up"\n')


@case
def sizes_that_do_not_fit_their_index(folder: Path) -> list[str]:
    return checked_model(folder, "  dim l = 3, f = [2, 4] by l\n  up : l f\n", '  up[l] = f as "{l}"\n')


@case
def live_rows_of_a_product(folder: Path) -> list[str]:
    return checked_model(folder, "  dim v = 5, h = 2\n  w : v h\n", '  w = pad((v h), 4, live) as "w"\n')


@case
def live_rows_of_two_dims(folder: Path) -> list[str]:
    return checked_model(folder, "  dim v = 5, h = 3\n  w : v h\n", '  w = pad(v, 4, live) pad(h, 2, live) as "w"\n')


@case
def live_rows_of_a_flat_buffer(folder: Path) -> list[str]:
    return checked_model(
        folder,
        "  dim v = 5\n  w : v\n  state m : f32\n",
        '  w = v as "w"\n  state m = pad(flat(each), 4, live) as "m"\n',
    )


BLOBS = """ucpl 1

model m {
  dim a = 4
  dtype f32
  w : a
}

layout x(dp) of m {
  mesh dp
  framework torch()
  file weights = torch "w_{dp}.pt"
  w = a@dp  as "w"
  LINE
}
"""


def with_blob(folder: Path, line: str, target: str, dp: int = 2) -> list[str]:
    """A checkpoint with random states of two ranks, and both sides' specs."""
    (folder / "ours.ucpl").write_text(BLOBS.replace("LINE", line))
    (folder / "theirs.ucpl").write_text(BLOBS.replace("LINE", target))
    (folder / "source").mkdir()
    for rank in range(2):
        torch.save({"w": torch.zeros(2), "rng": rank}, folder / "source" / f"w_{rank}.pt")
    return ["convert", "source", "target", "--from", "ours.ucpl:x(dp=2)", "--to", f"theirs.ucpl:x(dp={dp})"]


@case
def blob_of_another_degree(folder: Path) -> list[str]:
    return with_blob(folder, "blob rng @dp keep", "blob rng @dp keep", 4)


@case
def blob_that_the_source_lacks(folder: Path) -> list[str]:
    return with_blob(folder, "blob rng @dp keep", 'blob rng @dp keep\n  blob seed first as "seed"')


@case
def blob_whose_copies_differ(folder: Path) -> list[str]:
    return with_blob(folder, "blob rng keep", "blob rng keep")


@case
def blob_that_is_not_there(folder: Path) -> list[str]:
    return with_blob(folder, 'blob rng @dp keep as "states/rng"', 'blob rng @dp keep as "states/rng"')


@case
def blob_without_its_axis(folder: Path) -> list[str]:
    argv = with_blob(folder, "blob rng @dp keep", "blob rng @dp keep")
    text = BLOBS.replace("LINE", "blob rng @dp keep").replace("w_{dp}.pt", "w.pt").replace('"w"', '"w.{dp}"')
    (folder / "theirs.ucpl").write_text(text)
    return argv


@case
def blob_of_another_framework(folder: Path) -> list[str]:
    source(folder)
    inferred(folder)
    with open(folder / "spec.ucpl", "a") as file:
        file.write("\nlayout more() of checkpoint extends stored() {\n  blob lr_scheduler keep in weights\n}\n")
    return ["convert", "source", "target", "--to", "spec.ucpl:more()"]


@case
def blob_with_a_dtype(folder: Path) -> list[str]:
    return with_blob(folder, "blob rng @dp keep", "blob rng @dp keep dtype f32")


@case
def blob_along_no_axis(folder: Path) -> list[str]:
    return with_blob(folder, "blob rng @dp keep", "blob rng @tp keep")


@case
def lossy_dtype(folder: Path) -> list[str]:
    source(folder)
    inferred(folder)
    with open(folder / "spec.ucpl", "a") as file:
        file.write(
            '\nlayout narrow() of checkpoint extends stored() {\n  ln_f.bias = ... as "ln_f.bias" dtype bf16\n}\n'
        )
    return ["convert", "source", "target", "--to", "spec.ucpl:narrow()"]


# ---- a spec against a checkpoint -------------------------------------------------------------------------------------


@case
def unlisted_tensor(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--from", without_line(folder, r"calls +=")]


@case
def entry_that_matches_nothing(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--from", inferred(folder, ('as "ln_f.bias"', 'as "ln_final.bias"'))]


@case
def shape_that_disagrees(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--from", inferred(folder, (": 67 24", ": 68 24"))]


@case
def order_that_disagrees(folder: Path) -> list[str]:
    source(folder)
    return [*CONVERT, "--from", inferred(folder, ("mix, wte.weight, wpe.weight", "wte.weight, mix, wpe.weight"))]


# ---- damaged checkpoints ---------------------------------------------------------------------------------------------


@case
def no_such_path(folder: Path) -> list[str]:
    return ["convert", "source", "target", "--to", "plain()"]


@case
def empty_folder(folder: Path) -> list[str]:
    (folder / "source").mkdir()
    return CONVERT


@case
def text_file(folder: Path) -> list[str]:
    (folder / "source").write_text("no checkpoint\n")
    return CONVERT


@case
def latest_is_missing(folder: Path) -> list[str]:
    (source(folder) / "latest").unlink()
    shutil.copytree(folder / STEP, folder / "source" / "global_step6")
    return CONVERT


@case
def latest_leads_nowhere(folder: Path) -> list[str]:
    (source(folder) / "latest").write_text("global_step9")
    return CONVERT


@case
def missing_rank(folder: Path) -> list[str]:
    source(folder)
    (folder / STEP / "zero_pp_rank_2_mp_rank_00_optim_states.pt").unlink()
    return CONVERT


@case
def two_files_for_one_rank(folder: Path) -> list[str]:
    source(folder)
    name = "zero_pp_rank_2_mp_rank_00_optim_states.pt"
    shutil.copy(folder / STEP / name, folder / STEP / f"bf16_{name}")
    return CONVERT


@case
def ranks_swapped(folder: Path) -> list[str]:
    source(folder)
    one, other = (folder / STEP / f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt" for r in (1, 2))
    kept = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(kept)
    return CONVERT


@case
def no_shard_of_the_optimizer(folder: Path) -> list[str]:
    source(folder)
    for shard in (folder / STEP).glob("*_optim_states.pt"):
        shard.unlink()
    return ["convert", "source", "target", "--to", "plain()"]


@case
def truncated_file(folder: Path) -> list[str]:
    source(folder)
    path = folder / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:9000])
    return CONVERT


@case
def flipped_bit(folder: Path) -> list[str]:
    source(folder)
    flip(folder / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt", "/data/3", 1001)
    return ["convert", "source", "target", "--to", "plain()"]


@case
def flipped_bit_found_by_verify(folder: Path) -> list[str]:
    source(folder)
    flip(folder / STEP / "zero_pp_rank_1_mp_rank_00_optim_states.pt", "/data/3", 1001)
    return ["verify", "source"]


@case
def unequal_copies(folder: Path) -> list[str]:
    """A tied head that has drifted from its owner."""

    def drift(value: dict[str, Any]) -> None:
        value["module"]["lm_head.weight"] = value["module"]["lm_head.weight"].clone()
        value["module"]["lm_head.weight"][41, 7] += 1

    source(folder)
    changed(folder, drift)
    return CONVERT


@case
def unequal_copies_found_by_verify(folder: Path) -> list[str]:
    unequal_copies(folder)
    return ["verify", "source"]


@case
def weight_that_is_not_its_master(folder: Path) -> list[str]:
    def drift(value: dict[str, Any]) -> None:
        value["module"]["blocks.0.mlp.down.weight"][3, 5] += 1

    source(folder)
    changed(folder, drift)
    return ["verify", "source"]


@case
def pickle_that_would_run_code(folder: Path) -> list[str]:
    source(folder)
    changed(folder, lambda value: value.update(foo=Runs(folder / "marker")))
    return CONVERT


@case
def object_of_unknown_class(folder: Path) -> list[str]:
    import sys
    from types import ModuleType

    source(folder)
    parent, module = ModuleType("my_project"), ModuleType("my_project.tracking")
    module.Tracker = Tracker  # type: ignore[attr-defined]
    sys.modules |= {"my_project": parent, "my_project.tracking": module}
    try:
        changed(folder, lambda value: value.update(foo=Tracker()))
    finally:
        del sys.modules["my_project"], sys.modules["my_project.tracking"]
    return CONVERT


@case
def without_permission(folder: Path) -> list[str]:
    source(folder)
    (folder / MODEL).chmod(0)
    return CONVERT


# ---- targets and plans -----------------------------------------------------------------------------------------------


@case_that_keeps_its_target
def existing_target(folder: Path) -> list[str]:
    source(folder)
    (folder / "target").mkdir()
    (folder / "target" / "precious.txt").write_text("mine\n")
    return CONVERT


@case
def target_in_the_source(folder: Path) -> list[str]:
    source(folder)
    return ["convert", "source", "source/target", "--to", "zero1(dp=3)"]


@case
def target_without_a_folder(folder: Path) -> list[str]:
    source(folder)
    (folder / "notes.txt").write_text("a file")
    return ["convert", "source", "notes.txt/target", "--to", "zero1(dp=3)"]


@case
def plan_for_another_checkpoint(folder: Path) -> list[str]:
    good("plan", "--from", FIXTURES / "z2_dp3_frozen", "--to", "zero1(dp=2)", "-o", folder / "other.plan")
    source(folder, "z1_dp4")
    return ["apply", "other.plan", "source", "target"]


@case
def plan_for_another_dtype(folder: Path) -> list[str]:
    good("plan", "--from", FIXTURES / "z1_dp2_bf16opt", "--to", "plain()", "-o", folder / "other.plan")
    source(folder, "z1_dp2_bf16")
    return ["apply", "other.plan", "source", "target"]


@case
def plan_made_before_a_tensor_came(folder: Path) -> list[str]:
    from safetensors.torch import save_file

    (folder / "source").mkdir()
    save_file({"a": torch.arange(6.0)}, folder / "source" / "model.safetensors")
    good("plan", "--from", folder / "source", "--to", "plain()", "-o", folder / "early.plan")
    save_file({"a": torch.arange(6.0), "b": torch.zeros(2, 3)}, folder / "source" / "model.safetensors")
    return ["apply", "early.plan", "source", "target"]


@case
def damaged_plan(folder: Path) -> list[str]:
    good("plan", "--from", source(folder), "--to", "zero1(dp=2)", "-o", folder / "some.plan")
    raw = bytearray((folder / "some.plan").read_bytes())
    raw[-9] ^= 1
    (folder / "some.plan").write_bytes(raw)
    return ["apply", "some.plan", "source", "target"]


@case
def no_plan(folder: Path) -> list[str]:
    source(folder)
    (folder / "some.plan").write_text(json.dumps({}))
    return ["apply", "some.plan", "source", "target"]


@case
def element_that_the_plan_does_not_have(folder: Path) -> list[str]:
    good("plan", "--from", source(folder), "--to", "zero1(dp=2)", "-o", folder / "some.plan")
    return ["why", "some.plan", "wte.weight[67, 0]"]


@case
def tensor_that_the_plan_does_not_have(folder: Path) -> list[str]:
    good("plan", "--from", source(folder), "--to", "zero1(dp=2)", "-o", folder / "some.plan")
    return ["why", "some.plan", "wte.wieght[3, 4]"]


def with_globs(folder: Path, *lines: str, of: str = "any") -> list[str]:
    """A small model, a layout of these lines, and the show command."""
    text = "ucpl 1\nmodel m {\n  attn.q.weight : 4 6 dtype f32\n}\n"
    text += f'layout x(tp = 2) of {of} {{\n  mesh tp\n  file weights = torch "{{tp}}.pt"\n'
    (folder / "globs.ucpl").write_text(text + "".join(f"  {line}\n" for line in lines) + "}\n")
    return ["show", "globs.ucpl:x()", "--model", "globs.ucpl:m"]


@case
def globs_that_tie(folder: Path) -> list[str]:
    return with_globs(folder, '"*.q.weight" = _@tp ... as "{name}"', '"attn.*ight" = _ _@tp as "{name}"')


@case
def glob_in_a_layout_of_a_named_model(folder: Path) -> list[str]:
    return with_globs(folder, '"*.q.weight" = _@tp ... as "{name}"', of="m")


@case
def glob_with_an_index(folder: Path) -> list[str]:
    return with_globs(folder, '"*.q.weight"[l] = _@tp ... as "{name}"')


def with_scales(folder: Path, source: str, target: str, plan: str) -> list[str]:
    """A model of one tensor in blocks, two layouts, a plan command."""
    text = "ucpl 1\nmodel m {\n  dim r = 384, rb = 3\n  w : r dtype f8_e4m3fn\n  s : rb dtype f32 is scale of w by 128\n}\n"
    for name, lines in (("a", source), ("b", target)):
        text += f'layout {name}(tp = 2) of m {{\n  mesh tp\n  file weights = torch "{{tp}}.pt"\n  {lines}\n}}\n'
    (folder / "scales.ucpl").write_text(text)
    return ["plan", "--from", "scales.ucpl:a()", "--to", plan]


FACTORS = 'w = r@spread(tp, 128) as "w"\n  s = rb@spread(tp) as "s"'
PRODUCT = 'w = r@tp dtype bf16 value x * scale as "w"'


@case
def quantising(folder: Path) -> list[str]:
    return with_scales(folder, PRODUCT, FACTORS, "scales.ucpl:b()")


@case
def product_of_another_type(folder: Path) -> list[str]:
    return with_scales(folder, FACTORS, PRODUCT.replace("bf16", "i8"), "scales.ucpl:b()")


@case
def cut_inside_a_block(folder: Path) -> list[str]:
    return with_scales(folder, FACTORS.replace("@spread(tp, 128)", "@tp"), PRODUCT, "scales.ucpl:b()")


def with_bytes(folder: Path, source: str, target: str) -> list[str]:
    """A tensor of two elements per byte, two layouts, their plan command."""
    text = "ucpl 1\nmodel m {\n  dim r = 4, c = 36\n  w : r c dtype f4_e2m1fn\n}\n"
    for name, line in (("a", source), ("b", target)):
        text += f'layout {name}(tp = 4) of m {{\n  mesh tp\n  file weights = torch "{{tp}}.pt"\n  {line}\n}}\n'
    (folder / "bytes.ucpl").write_text(text)
    return ["plan", "--from", "bytes.ucpl:a()", "--to", "bytes.ucpl:b()"]


@case
def cut_inside_a_byte(folder: Path) -> list[str]:
    return with_bytes(folder, 'w = r@tp c as "w"', 'w = r c@tp as "w"')


@case
def byte_of_an_odd_dim(folder: Path) -> list[str]:
    argv = with_bytes(folder, 'w = r c as "w"', 'w = r c as "w"')
    (folder / "bytes.ucpl").write_text((folder / "bytes.ucpl").read_text().replace("c = 36", "c = 35"))
    return argv


@case
def bytes_taken_apart(folder: Path) -> list[str]:
    return with_bytes(folder, 'w = r@tp c as "w"', 'w = c@tp r dtype u8 as "w"')


@case
def rounding_into_blocks(folder: Path) -> list[str]:
    return with_bytes(folder, 'w = r@tp c dtype bf16 as "w"', 'w = r c as "w"')


@case
def number_that_would_become_infinite(folder: Path) -> list[str]:
    text = "ucpl 1\nmodel m {\n  w : 2 3 dtype f32\n}\n"
    for name, more in (("a", ""), ("b", " dtype f16 lossy")):
        text += (
            f'layout {name}() of m {{\n  framework torch()\n  file weights = torch "w.pt"\n  w = _ _{more} as "w"\n}}\n'
        )
    (folder / "wide.ucpl").write_text(text)
    (folder / "source").mkdir()
    torch.save({"w": torch.tensor([[1.0, 65504.0, 2.0], [3.0, -70000.0, 4.0]])}, folder / "source" / "w.pt")
    return ["convert", "source", "target", "--from", "wide.ucpl:a()", "--to", "wide.ucpl:b()"]


@case
def exponents_that_are_told_as_numbers(folder: Path) -> list[str]:
    source, target = FACTORS.replace(' as "s"', ' dtype u8 as "s"'), PRODUCT
    argv = with_scales(folder, source, target, "scales.ucpl:b()")
    (folder / "scales.ucpl").write_text(
        (folder / "scales.ucpl").read_text().replace("s : rb dtype f32", "s : rb dtype i32")
    )
    return argv


@case
def scale_of_no_size(folder: Path) -> list[str]:
    argv = with_scales(folder, FACTORS, PRODUCT, "scales.ucpl:b()")
    text = (folder / "scales.ucpl").read_text()
    (folder / "scales.ucpl").write_text(text.replace("r = 384", "r = 385"))
    return argv


@case
def form_that_no_store_knows(folder: Path) -> list[str]:
    source(folder)
    text = 'ucpl 1\nlayout x() of any {\n  framework torch()\n  file weights = dcp "all.distcp"\n  * = ... as "{name}"\n}\n'
    (folder / "spec.ucpl").write_text(text)
    return ["convert", "source", "target", "--to", "spec.ucpl:x()"]


@case
def name_of_another_form(folder: Path) -> list[str]:
    source(folder)
    text = 'ucpl 1\nlayout x() of any {\n  framework torch()\n  file weights = safetensors "all.pt"\n  * = ... as "{name}"\n}\n'
    (folder / "spec.ucpl").write_text(text)
    return ["convert", "source", "target", "--to", "spec.ucpl:x()"]


@case
def adapter_under_another_name(folder: Path) -> list[str]:
    from safetensors.torch import save_file

    (folder / "source").mkdir()
    save_file({"a": torch.arange(6.0)}, folder / "source" / "adapter_model.safetensors")
    text = "ucpl 1\nmodel m {\n  a : 6\n}\nlayout x() of m {\n  framework huggingface()\n"
    text += '  file weights = safetensors "model.safetensors"\n  a = _ as "a"\n}\n'
    (folder / "spec.ucpl").write_text(text)
    return ["convert", "source", "target", "--from", "spec.ucpl:x()", "--to", "plain()"]


@case
def file_outside_of_the_checkpoint(folder: Path) -> list[str]:
    torch.save({"a": torch.arange(6.0)}, folder / "secret.pt")
    (folder / "source").mkdir()
    text = "ucpl 1\nmodel m {\n  a : 6 dtype f32\n}\nlayout x() of m {\n  framework torch()\n"
    text += '  file weights = torch "../secret.pt"\n  a = _ as "a"\n}\n'
    (folder / "spec.ucpl").write_text(text)
    return ["convert", "source", "target", "--from", "spec.ucpl:x()", "--to", "plain()"]


@case
def clause_that_does_nothing(folder: Path) -> list[str]:
    source(folder)
    text = 'ucpl 1\nlayout x() of any {\n  framework torch()\n  file weights = torch "a.pt"\n'
    text += '  * = ... as "{name}" buckets 9\n}\n'
    (folder / "spec.ucpl").write_text(text)
    return ["convert", "source", "target", "--to", "spec.ucpl:x()"]


def is_root() -> bool:
    """Whom no permission stops."""
    return os.geteuid() == 0


__all__ = ["CASES", "Case", "is_root"]


# ---- companion files ------------------------------------------------------------------------------------------------


def trainers(folder: Path) -> Path:
    """A copy of a real folder of transformers' Trainer."""
    shutil.copytree(FIXTURES.parent / "trainer" / "checkpoint-3", folder / "source")
    return folder / "source"


@case
def arguments_that_would_run_code(folder: Path) -> list[str]:
    torch.save(Runs(folder / "marker"), trainers(folder) / "training_args.bin")
    return CONVERT


@case
def arguments_that_are_cut_short(folder: Path) -> list[str]:
    file = trainers(folder) / "training_args.bin"
    file.write_bytes(file.read_bytes()[:1000])
    return CONVERT


@case
def data_set_beside_the_shards(folder: Path) -> list[str]:
    here = trainers(folder) / "data"
    here.mkdir()
    for number in range(10_001):
        (here / str(number)).touch()
    return CONVERT


@case
def weights_of_another_step(folder: Path) -> list[str]:
    file = trainers(folder) / "model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-2] ^= 1
    file.write_bytes(raw)
    return ["verify", "source", "--no-witness"]


@case
def folder_of_several_checkpoints(folder: Path) -> list[str]:
    trainers(folder).rename(folder / "checkpoint-9")
    (folder / "source").mkdir()
    shutil.copytree(folder / "checkpoint-9", folder / "source" / "checkpoint-10")
    (folder / "checkpoint-9").rename(folder / "source" / "checkpoint-9")
    return ["inspect", "source"]


@case
def two_engines_of_one_loop(folder: Path) -> list[str]:
    shutil.copytree(FIXTURES.parent / "accelerate" / "state", folder / "source")
    shutil.copytree(folder / "source" / "pytorch_model", folder / "source" / "pytorch_model_1")
    return CONVERT


@case
def shards_that_were_renamed(folder: Path) -> list[str]:
    shutil.copytree(FIXTURES.parent / "accelerate" / "state", folder / "source")
    (folder / "source" / "pytorch_model").rename(folder / "source" / "global_step2")
    (folder / "source" / "latest").write_text("global_step2")
    return CONVERT


@case
def stages_of_ties_that_names_do_not_tell(folder: Path) -> list[str]:
    good("convert", FIXTURES / "pp2_dp2_z1_functions", folder / "source", "--to", "universal()")
    return ["convert", "source", "target", "--to", "zero1(pp=2, dp=2)"]


@case
def experts_of_autoep_without_zero(folder: Path) -> list[str]:
    source(folder, "autoep_ep2_dp4_z1")
    return ["convert", "source", "target", "--to", "zero0(dp=4)"]
