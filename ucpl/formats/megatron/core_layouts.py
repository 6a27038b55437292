"""The chunks of a torch_dist folder as a layout in the language.

A target can have its optimizer in buckets of each rank (`dp_reshardable`). Weights are then cut as on tensor-parallel ranks,
and a state of a parameter is a chunk of its rank's bucket. The layout gives the bucket and the parameter's number in it; the
store gives the begin of each. A gated linear_fc1 is two chunks of a rank. The names that Megatron requests at load depend on
tp, pp, ep, virtual stages and the size of buckets, and not on data parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.extents import Sharding
from ucpl.formats.dcp.grids import Lines, by_dims
from ucpl.formats.dcp.mesh import boxes_of
from ucpl.formats.dcp.metadata import METADATA
from ucpl.formats.megatron import legacy_names as names
from ucpl.formats.megatron.dealt import Buffer, DealtModel, refuse, with_whole
from ucpl.formats.megatron.homes import Legacy
from ucpl.formats.megatron.legacy_arguments import arguments_in, has_grouped_mlp
from ucpl.formats.megatron.legacy_buffers import BufferParameter, divided
from ucpl.formats.megatron.legacy_layouts import at_ranks
from ucpl.inference.parallel import TARGET, Base, Extended, Note, origins, pattern
from ucpl.inference.stages import STAGES
from ucpl.language import nodes, parse, print_file
from ucpl.language.printer import print_axis
from ucpl.language.words import quote

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

BUCKETS = "dp_reshardable"
FORMS = ("fully_reshardable", BUCKETS)
SIZE = "bucket_size"
_ALONE = ("ep", "vpp", SIZE, STAGES)  # arguments that the other form does not use
_MESH = "pp ep tp halves"


def is_in_buckets(layout: nodes.Layout, call: nodes.Call) -> bool:
    """Test whether a target has its optimizer in buckets.

    Buckets are of modules, and not of stacks of layers.
    """
    return _form_of(layout, call) == BUCKETS


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of a folder, with chunks as cells of a grid."""
    shapes = {t.name: t.shape for t in checkpoint.state.tensors}
    boxes = boxes_of(checkpoint.extents.values(), {name: len(shape) for name, shape in shapes.items()})
    has_masters = base.inherited["masters"][0]
    lines = Lines(
        shapes,
        boxes,
        dict.fromkeys(shapes, "{name}"),
        settings={n: base.inherited[n][0] for n in ("file", "masters", "master")},
        framework="framework megatron_core(masters = masters, master = master)",
        states=(
            *(('state fp32 for * = like  as "optimizer.state.{master}.{name}"',) if has_masters else ()),
            'state * for * = like  as "optimizer.state.{state}.{name}"',
            *(() if has_masters else ("derive fp32 from weight",)),
        ),
    )
    return by_dims(base, lines, checkpoint.root / METADATA)


def target(base: Base, source: Checkpoint | None) -> Extended:
    """The layout of a target: the shipped one, or one of buckets.

    The shipped one cuts the first dim of each tensor; tensors without dims have a line of their own.
    Raises: UcplError E542, E543, E547 if the model cannot be split over the ranks of the buckets.
    """
    _check_form(base)
    if is_in_buckets(base.layout, base.call):
        return _in_buckets(base, source)
    return with_whole(base)


# ---- buckets ---------------------------------------------------------------------------------------------------------


def _form_of(layout: nodes.Layout, call: nodes.Call) -> str:
    """The form of the optimizer in a call of the shipped layout."""
    found = next((p.default for p in layout.parameters if p.name == "optimizer"), None)
    for position, argument in enumerate(call.arguments):
        name = argument.name
        if name is None and position < len(layout.parameters):
            name = layout.parameters[position].name
        if name == "optimizer":
            found = argument.value
    return found.value if isinstance(found, nodes.Text) else ""


def _check_form(base: Base) -> None:
    """Check the form, and that its arguments are used.

    Raises: UcplError E547 for a form that is not written, and for arguments of the other form.
    """
    form = _form_of(base.layout, base.call)
    if form not in FORMS:
        refuse(
            f'optimizer = "{form[:40]}" is not written',
            base,
            f'optimizer = "{FORMS[0]}", which Megatron loads at other degrees, too, or "{BUCKETS}"',
        )
    idle = next((a.name for a in base.call.arguments if a.name in _ALONE), None)
    if form != BUCKETS and idle is not None:
        refuse(
            f"{idle} has no effect on a {FORMS[0]} folder, which Megatron loads at any",
            base,
            f'take it out, or say optimizer = "{BUCKETS}"',
        )


def _in_buckets(base: Base, source: Checkpoint | None) -> Extended:
    """The layout of a target in buckets.

    Raises: UcplError E542, E543, E547 if the model cannot be split over so many ranks.
    """
    made = DealtModel.of(base, source)
    base = made.base
    if any(isinstance(i, nodes.Alias) and i.path != names.OUTPUT for i in base.model.items):
        refuse("a second name of a tensor is none that Megatron has", base)
    if source is not None and any(map(names.is_expert, made.shapes)) and has_grouped_mlp(arguments_in(source)):
        refuse(
            f'optimizer = "{BUCKETS}" of a run whose experts are those of GroupedMLP: it would take transposed moments out of'
            " buckets that have each expert separately",
            base,
            "take it out: fully_reshardable is loaded by a job with GroupedMLP and by others",
        )
    if not made.states:
        refuse(
            f'optimizer = "{BUCKETS}", and of weights alone there are no buckets',
            base,
            f'take `optimizer = "{BUCKETS}"` out',
        )
    legacy = made.legacy()
    if legacy.tp > 1:
        made.shardings = {name: made.dialect.sharding(name, legacy.tp) for name in made.shapes}
    size = base.asked(SIZE, 0)
    if size < 0:
        refuse(f"{SIZE} = {size}: elements, or 0 for one bucket of each buffer", base)
    gated = [name for name, cut in made.shardings.items() if cut.dim is not None and len(cut.sections) > 1]
    out = [
        f"  mesh {_MESH}",
        *_entries(legacy, made.shardings),
        "  * is alias = none",
        *_states(made, legacy, size, base),
    ]
    text = "\n".join(("ucpl 2", f"layout lines(halves = {2 if gated else 1}) of any {{", *out, "}", ""))
    (lines,) = parse(text, "megatron_core").statements
    assert isinstance(lines, nodes.Layout)
    notes: list[Note] = [*origins(made.shardings)]
    notes += made.notes()
    sentence = f"closed at {size} elements, on the first stage" if size else "one of each buffer"
    notes.append(("buckets", sentence, "as --overlap-grad-reduce" if size else "as without --overlap-grad-reduce"))
    return evolve(_of(base, lines), notes=tuple(notes))


def _of(base: Base, lines: nodes.Layout) -> Extended:
    """The shipped layout with these lines for its own."""
    known = base.layout
    if len(base.library.chain(base.call.name)) > 1:
        refuse(
            f"`{known.name}` extends megatron_core, and buckets are of its own call alone", base, "megatron_core(...)"
        )
    kept = [i for i in known.items if isinstance(i, nodes.Framework | nodes.Files | nodes.Fill | nodes.FillStates)]
    made = nodes.Layout(TARGET, (*known.parameters, *lines.parameters), "any", None, (*kept, *lines.items))
    larger = evolve(base.library, known=dict(base.library.known), files=dict(base.library.files))
    file = f"{TARGET}.ucpl"
    larger.add(parse(print_file(nodes.File(file, 2, (made,))), file))
    return Extended(larger, evolve(base.call, name=TARGET))


def _entries(legacy: Legacy, shardings: Mapping[str, Sharding]) -> Iterator[str]:
    for name, homes in legacy.homes.items():
        axes = _axes(shardings.get(name))
        for number, home in enumerate(homes):
            key = ' in weights as "{name}"' if number == 0 else ""  # a stage that shares it has states of it alone
            yield f"  {quote(name)} = {axes}{at_ranks(legacy, home.stage, home.ep)}{key}"


def _axes(cut: Sharding | None) -> str:
    if cut is None or cut.dim is None:
        return "..."
    if len(cut.sections) == 1:
        return " ".join(map(print_axis, pattern(cut)))
    assert cut.dim == 0, "a gate and an up projection are above each other"
    sizes = ", ".join(str(section.size) for section in cut.sections)
    return f"_@halves[{sizes}]@tp{' ...' if len(cut.shape) > 1 else ''}"


def _states(made: DealtModel, legacy: Legacy, size: int, base: Base) -> Iterator[str]:
    """A group and two state lines for each bucket."""
    run = 0
    for buffer in made.buffers(legacy):
        if buffer.dtypes.startswith("(torch.float16,"):
            refuse(
                f"weights of 16 bits of {buffer.dtypes}: each rank keeps the state of its loss scaler, which is not written",
                base,
                f'optimizer = "{FORMS[0]}"',
            )
        for ep in range(legacy.ep) if buffer.is_expert else (None,):
            members = [n for n in buffer.members if ep is None or legacy.homes[n][0].ep == ep]
            lead = f"{_chain(legacy, buffer)}optimizer.distributed.dp_group_idx_{_group(legacy, buffer.stage, ep)}"
            lead += f".gbuf_idx_{buffer.number}.dtype_{buffer.dtypes}"
            is_bucketed = buffer.stage == 0 and buffer.chunk == 0
            listed = [BufferParameter(n, made.numel(n), is_shared=_is_shared(n, legacy)) for n in reversed(members)]
            for number, (bucket, numel) in enumerate(divided(listed, size if size and is_bucketed else None)):
                group, where = f"run{run}", at_ranks(legacy, buffer.stage, ep)
                yield f"  group {group} = {', '.join(map(quote, bucket.names))}"
                for states, word in (("fp32", "param"), ("exp_avg, exp_avg_sq", "{state}")):
                    key = f"{lead}.bucket_idx_{number}.{word}/{numel}/{{member}}"
                    yield f"  state {states} for {group} = like{where} in weights as {quote(key)}"
                run += 1


def _chain(legacy: Legacy, buffer: Buffer) -> str:
    return f"chained_{int(buffer.is_expert)}." if legacy.chained else ""


def _group(legacy: Legacy, stage: int, ep: int | None) -> str:
    """The number of a rank's data-parallel group: tp is fastest, then ep."""
    rest = stage if ep is None else ep + legacy.ep * stage
    return f"{{tp + {legacy.tp * rest}}}"


def _is_shared(name: str, legacy: Legacy) -> bool:
    return name == names.EMBEDDING and len(legacy.homes[name]) > 1
