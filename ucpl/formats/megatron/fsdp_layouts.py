"""The chunks of a Megatron-FSDP folder as a layout in the language."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.formats.dcp.grids import Lines, by_dims
from ucpl.formats.dcp.layouts import without_dims
from ucpl.formats.dcp.mesh import boxes_of
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.megatron.dealt import check_moments, states_of
from ucpl.formats.megatron.fsdp_names import STATES, gated, in_modules
from ucpl.formats.megatron.legacy_arguments import arguments_in
from ucpl.formats.megatron.legacy_names import is_of_chunks
from ucpl.inference.parallel import TARGET, Base, Extended, extended
from ucpl.language import nodes, parse
from ucpl.language.words import quote
from ucpl.layout import resolve

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

_UNWRAPPED = "module.module."  # prefix of names in an fp32 run, without a module of 16 bits
_MASTER = "fp32"


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of an opened folder, with its chunks under modules' names."""
    shapes = {t.name: t.shape for t in checkpoint.state.tensors}
    trained = {t.name for t in checkpoint.state.tensors if _MASTER in t.states}
    keys = {(f"{STATES}{_MASTER}.{name}" if name in trained else name): name for name in shapes}
    found = boxes_of(checkpoint.extents.values(), {key: len(shapes[name]) for key, name in keys.items()})
    boxes = {name: found[key] for key, name in keys.items()}
    asked = {n: base.inherited[n][0] for n in ("file", "masters")}
    lines = Lines(
        shapes,
        boxes,
        {name: "" if name in trained else "{name}" for name in shapes},
        settings=asked,
        framework="framework megatron_fsdp(masters = masters)",
        states=(
            *((f'state * for * = like  in weights as "{STATES}{{state}}.{{name}}"',) if trained else ()),
            "derive weight from fp32" if trained else "derive fp32 from weight",
        ),
    )
    return by_dims(base, lines, checkpoint.root / METADATA)


def target(base: Base, source: Checkpoint | None) -> Extended:
    """The shipped layout with lines for gated linear_fc1 and tensors without dims.

    A gated linear_fc1 is cut between its halves.
    Raises: UcplError E543 if a linear_fc1 may be gated or not, E547 for a name that no module has.
    """
    check_moments(base, states_of(base))
    base = _with_masters(base)
    states = {name for item in base.model.items if isinstance(item, nodes.State) for name in item.names}
    said: dict[str, int | str] = {"masters": int(_MASTER in states)}
    numbers = arguments_in(source) if source is not None else {}
    if "bf16" in numbers and not numbers["bf16"] and not numbers.get("fp16"):
        said["owner"] = _UNWRAPPED
    if numbers.get("moe_grouped_gemm") and numbers.get("transformer_impl") != "local":
        said["grouped"] = 1
    if source is not None and source.format == "megatron_fsdp":
        said = {"masters": said["masters"]}  # it says these itself
    layout = resolve(base.library, base.call, model=base.model, config=base.config, inherited=base.inherited)
    shapes = {path: tensor.counts for path, tensor in layout.tensors.items()}
    other = next((name for name in shapes if is_of_chunks(name)), None)
    if other is not None:
        fail(
            "E547",
            f"`{other}` is a name of torch_dist, with all layers in one tensor or with half of a linear_fc1, and a folder of"
            " Megatron-FSDP's has none such",
            Label("<call>", where=base.call.name),
            remedy="convert to megatron_core(), which keeps these names, and that folder to this target",
        )
    if (numbered := next((name for name in shapes if in_modules(name) != name), None)) is not None:
        fail(
            "E547",
            f"`{numbered}` has the name of a weight of grouped experts, and names here are those of single experts",
            Label("<call>", where=base.call.name),
            remedy=f"call it `{in_modules(numbered)}`, and say grouped = 1 for files with the grouped names",
        )
    trained = {path for path, tensor in layout.tensors.items() if tensor.kind == "parameter"}
    if trained and {layout.tensors[path].dtype for path in trained} == {"f32"} and "owner" not in base.inherited:
        said["owner"] = _UNWRAPPED  # a run in fp32, whatever framework's
    halves = sorted(gated(shapes, shapes, "<call>"))
    said["halves"] = 2 if halves else 1
    out = []
    for name in halves:
        rows = shapes[name][0] // 2
        out.append((name, f"_@halves[{rows}, {rows}]@chunk(tp)@chunk(dp) ..."))
    out += [(name, "...") for name in sorted(without_dims(base.model))]
    masters = bool(said["masters"])
    lines = [
        f"  {quote(name)} = {axes}" + ("" if masters and name in trained else '  as "{name}"') for name, axes in out
    ]
    (made,) = parse("\n".join(("ucpl 2", "layout lines() of any {", *lines, "}", "")), "megatron_fsdp").statements
    assert isinstance(made, nodes.Layout)
    return evolve(extended(_with(base, said), TARGET, (), made.items), model=base.model)


def _with_masters(base: Base) -> Base:
    """The base over a model with masters, if it has only moments.

    This is a run in fp32, whose weights are its masters.
    """
    states = [item for item in base.model.items if isinstance(item, nodes.State) and not item.scalar]
    if not states or any(_MASTER in item.names for item in states):
        return base
    model = evolve(base.model, items=(*base.model.items, nodes.State((_MASTER,), "f32", False, None)))
    return evolve(base, model=model)


def _with(base: Base, said: dict[str, int | str]) -> Base:
    """The base with values for parameters that the call leaves open."""
    named = {argument.name for argument in base.call.arguments}
    more = tuple(
        nodes.Argument(name, nodes.Text(value) if isinstance(value, str) else nodes.Number(value))
        for name, value in said.items()
        if name not in named
    )
    return evolve(base, call=evolve(base.call, arguments=(*base.call.arguments, *more)))
