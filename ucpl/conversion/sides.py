"""Both sides of a plan: a described source, and a completed target.

A checkpoint or a spec describes the source. Values that the target's call leaves open come from the source.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.changes import Changes
from ucpl.conversion.dropping import changed_source, demand_layers
from ucpl.conversion.opening import infer, own_layout
from ucpl.conversion.ordering import is_read, without_order
from ucpl.conversion.requests import Called, Folding, Given, Inherited
from ucpl.conversion.side import Side, located
from ucpl.conversion.source_passes import OpenedSource, apply_source_passes, config_of
from ucpl.conversion.ties import framework_of, with_ties
from ucpl.conversion.training import (
    change_of,
    in_other_dtype,
    leaves_engine,
    training_of,
    with_called_dtype,
    with_stored_dtypes,
)
from ucpl.errors import Label, UcplError, fail
from ucpl.files.masters import FP32
from ucpl.files.masters import SETTING as MASTER_STATE
from ucpl.registry import format_named, format_of_layout

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint
    from ucpl.inference.infer import Inferred
    from ucpl.inference.parallel import Note
    from ucpl.inference.sizes import Found
    from ucpl.language import nodes
    from ucpl.placement import Placement

__all__ = [
    "families_of", "in_families", "inferred", "is_by_tensor", "sides", "source_side", "target_side", "with_common_families",
    "without_families",
]  # fmt: skip

# Tensors. A plan of fewer is cheap, and its nodes have the names of single ones.
FAMILIES_FROM = 2_000
_MISMATCHES = ("E124", "E320", "E321", "E322", "E323")  # of a layout with a checkpoint


def source_side(checkpoint: Checkpoint, described: Called | None, given: Given) -> Side:
    """The source of a conversion, inferred or described by a spec.

    The layout must fit the checkpoint. Sizes (-D) are those of a spec: an inferred layout leaves none open.

    Raises: UcplError E320-E323.
    """
    described = without_order(described) if described is not None else None
    if described is not None and is_read(described, checkpoint):
        described = None
    given = evolve(given, config=config_of(checkpoint, given.config), sizes=given.sizes if described else {})
    one = described or own_layout(checkpoint.top, checkpoint.format)
    if one is None:
        folding = given.folding
        found = infer(checkpoint, fold=folding is not None, kin=folding.kin if folding is not None else None)
        own = evolve(given, model=found.model, inherited=found.inherited)
        return Side(Called(found.library, found.call), own, found.placement, checkpoint)
    try:
        return _described_side(checkpoint, one, given)
    except UcplError as error:
        if error.diagnostics[0].code in _MISMATCHES:
            _reject_foreign(one, checkpoint)
            _reject_sibling(one, checkpoint, given)
        raise


def in_families(checkpoint: Checkpoint, described: Called | None, given: Given) -> Side:
    """The source, with families if it has many tensors.

    Tensors are in the order of their numbers, so that another checkpoint has the same. An error names a single tensor.
    """
    if len(checkpoint.state.tensors) >= FAMILIES_FROM:
        try:
            return source_side(checkpoint, described, evolve(given, folding=Folding(is_done=True, kin={})))
        except UcplError:
            pass
    return source_side(checkpoint, described, given)


def inferred(checkpoint: Checkpoint) -> Inferred:
    """The model and layout of a checkpoint.

    Many tensors are placed in families. An error names a single tensor. Raises: UcplError E320-E323.
    """
    if len(checkpoint.state.tensors) >= FAMILIES_FROM:
        try:
            return infer(checkpoint, fold=True, with_scales=False)
        except UcplError:
            pass
    return infer(checkpoint)


def is_by_tensor(checkpoint: Checkpoint) -> bool:
    """True if a verification names single tensors besides its faults.

    Masters are witnesses tensor by tensor, flat buffers state an order, and companion files have names.
    """
    state = checkpoint.state
    is_mastered = any(FP32 in tensor.states for tensor in state.tensors)
    return is_mastered or bool(state.parallel.flats) or checkpoint.container is not None


def without_families(side: Side) -> Placement:
    """The placement of a side with each tensor alone."""
    from ucpl.inference.infer import stated_of

    assert side.checkpoint is not None
    given = evolve(side.given, folding=None)
    return located(side.called, given, stated=stated_of(side.checkpoint)).placement


def with_common_families(here: Side, there: Side) -> tuple[Side, Side]:
    """Both sides with equal families, if each has some.

    A family of one side that is several of the other is divided.
    """
    ours, theirs = _owners(here), _owners(there)
    if ours and theirs and ours != theirs:
        there = evolve(there, placement=_folded(there, ours))
        here = evolve(here, placement=_folded(here, _owners(there)))
    return here, there


def _owners(side: Side) -> dict[str, str]:
    return {name: path for path, family in side.layout.families.items() for name in family.names}


def _folded(side: Side, kin: dict[str, str] | None = None) -> Placement:
    from ucpl.inference.infer import stated_of

    assert side.checkpoint is not None
    given = evolve(side.given, folding=Folding(is_done=True, kin=kin))
    return located(side.called, given, stated=stated_of(side.checkpoint)).placement


def families_of(side: Side) -> Callable[[], Placement] | None:
    """The placement of an inferred, large source with families."""
    checkpoint = side.checkpoint
    if checkpoint is None or not side.called.is_of_any or len(checkpoint.state.tensors) < FAMILIES_FROM:
        return None
    return partial(_folded, side)


def _described_side(checkpoint: Checkpoint, one: Called, given: Given) -> Side:
    """A source that a spec describes, with sizes of the checkpoint."""
    from ucpl.inference import parallel, ranks, vocabulary
    from ucpl.inference.infer import inherited_settings, model_of, stated_of
    from ucpl.inference.sizes import in_order, sizes_from, with_sizes
    from ucpl.inference.whole_shapes import with_shapes
    from ucpl.verification import spec_matches

    sizes = sizes_from(checkpoint, one.library, one.call, given.config, given.sizes)
    library = in_order(checkpoint, with_sizes(one.library, one.layout.of, sizes), one.layout.of)
    one = Called(library, one.call)
    shaped = with_shapes(checkpoint, one.library, one.call)
    given = evolve(
        given, model=model_of(shaped, {}) if one.is_of_any else None, inherited=inherited_settings(checkpoint)
    )
    notes = _notes_of(sizes)
    is_made = ranks.is_apart(checkpoint) or bool(vocabulary.padded(checkpoint))
    if one.is_of_any and given.model is not None and is_made and parallel.says_cuts_alone(*one):
        found = ranks.described(parallel.Base(*one, given.model, given.inherited, given.config), checkpoint)
        one, notes = Called(found.library, found.call), (*notes, *found.notes)
    made = located(one, given, stated=stated_of(checkpoint), notes=notes)
    spec_matches.demand(made.placement, checkpoint)
    return evolve(made, checkpoint=checkpoint, found=sizes)


def _reject_foreign(one: Called, checkpoint: Checkpoint) -> None:
    """Report a layout of other files.

    It is a shipped one, or one of another framework. Raises: UcplError E321.
    """
    from ucpl.inference.infer import layout_name
    from ucpl.language import nodes
    from ucpl.language.printer import print_expr

    of, is_shipped = framework_of(one), one.is_of_any and one.call.name in one.format.layouts
    if not is_shipped and (of == checkpoint.format or format_named(of).is_of_a_spec):
        return
    try:
        found = infer(checkpoint, fold=True)
    except UcplError:
        return
    name = layout_name(checkpoint)
    node = found.library.layout(name).node
    needed = {p.name for p in node.parameters if p.default is None} if isinstance(node, nodes.Layout) else set()
    values = {n: v for n, v, _ in found.layout.origins if n in needed or (isinstance(v, int) and v > 1)}
    own = f"{name}({', '.join(f'{n} = {v}' for n, v in values.items())})"
    given = f"{one.call.name}({', '.join(f'{a.name} = {print_expr(a.value)}' for a in one.call.arguments)})"
    fail(
        "E321",
        f"the files are those of {own}, and not of {given}",
        Label("<call>", where=given),
        Label(str(checkpoint.top)),
        remedy=f"leave {given} out: it is inferred",
    )


def _reject_sibling(one: Called, checkpoint: Checkpoint, given: Given) -> None:
    """Report a layout whose file has one that fits. Raises: UcplError E321."""
    from ucpl.language import nodes

    file, of = one.layout.span.file, framework_of(one)
    for known in tuple(one.library.known.values()):  # reading a base of one adds to them
        node = known.node
        if (
            not isinstance(node, nodes.Layout)
            or node.span.file != file
            or node.of == "any"
            or node.name == one.call.name
        ):
            continue
        other = Called(one.library, nodes.Call(node.name, ()))
        if any(parameter.default is None for parameter in node.parameters) or framework_of(other) != of:
            continue
        try:
            _described_side(checkpoint, other, given)
        except UcplError:
            continue
        name = PurePath(file).name if file.startswith("specs/") else file
        fail(
            "E321",
            f"{checkpoint.top} has the names of `{node.name}`, and not of `{one.call.name}`",
            Label(str(checkpoint.top)),
            remedy=f"write {name}:{node.name}",
        )


def target_side(one: Called, source: Side, given: Given) -> Side:
    """The target of a conversion, completed from the source.

    Values that its call leaves open come from the source, with their origin. If a shipped layout is called at another
    tensor-parallel degree, `zero1(dp=2, tp=4)`, it gets the cuts that DeepSpeed makes at that degree, derived from the source's
    cuts; `kv_heads` gives a size for them (inference/parallel). If the source is not tensor parallel, the cuts come
    from the class that a config names (inference/autotp), or from a user's layout that extends zero1. `pp`, `stages` and
    `partition` distribute the layers of a pipeline, or, with `tied`, of tensors with a pipeline's names (inference/layered).
    `ep` distributes experts.
    """
    from ucpl.inference.sizes import with_sizes

    one = Called(with_sizes(one.library, one.layout.of, source.found), one.call)
    model = given.model or source.model
    own = _own_model(one, source, given)
    changes = _changes(source, given, own)
    if model is not None and changes is not None and own is None:
        from ucpl.conversion.changing import changed_model

        model = changed_model(model, changes)
    if model is not None and given.model is None and source.checkpoint is not None and not source.called.is_of_any:
        model = with_stored_dtypes(model, source)
    of = format_named(source.checkpoint.format if source.checkpoint is not None else "")
    left = of.not_inherited(one.format)
    if FP32 in given.drop:
        left |= {MASTER_STATE}
    if leaves_engine(source, framework_of(one)):
        left |= {"bf16", "fp16", "masters"}
    given = evolve(
        given,
        model=model,
        config=given.config if given.config is not None else source.given.config,
        inherited={
            **training_of(source, framework_of(one)),
            **_in_container(source, framework_of(one)),
            **{name: value for name, value in source.given.inherited.items() if name not in left},
        },
    )
    given = with_called_dtype(one, source, given)
    notes = _notes_of(source.found)
    if format_of_layout(one.call.name).has_model_files:  # else no loader of a model reads it
        from ucpl.conversion.loader_names import for_loader

        one, names = for_loader(one, source, given)
        notes = (*names, *notes)
    own = given.model if one.is_of_any else one.model(given)
    if own is not None and given.fill:
        from ucpl.conversion.filling import with_fills

        one = with_fills(one, given.fill, own, source.layout.tensors)
    base = _without(source, changes)
    made = _cut_as_deepspeed(one, base, given, notes)
    given, ties = with_ties(made, source, given)
    if ties:
        notes = (*notes, *ties)
        made = _cut_as_deepspeed(one, base, given, notes)
    change = change_of(source, made.layout)
    if change is not None and one.is_of_any:
        given = in_other_dtype(given, source, change)
        made = _cut_as_deepspeed(one, base, given, notes)
    if given.model is not None:
        from ucpl.inference.whole_shapes import check_gate_kept

        check_gate_kept(*one, made.layout)
    return made if changes is None else _changed(made, source, changes)


def _in_container(source: Side, framework: str) -> Inherited:
    """Settings of a target in the folder of a training framework.

    The framework finds the target by fixed names.
    """
    container = source.checkpoint.container if source.checkpoint is not None else None
    target = format_named(framework)
    if container is None or not container.kind.holds(target):
        return {}
    return {name: (value, container.kind.resumes_by) for name, value in target.settings_in_container.items()}


def _own_model(one: Called, source: Side, given: Given) -> nodes.Model | None:
    """The target's own model. None: the source's, with changes by name."""
    if not one.is_of_any:
        return one.model(evolve(given, config=given.config if given.config is not None else source.given.config))
    return given.model if given.model is not None and given.model != source.model else None


def _changes(source: Side, given: Given, own: nodes.Model | None) -> Changes | None:
    """Requested changes of the source's parameters.

    None: none are requested. Raises: UcplError E300, E327, E328, E329.
    """
    if not (given.drop or given.freeze or given.train):
        return None
    from ucpl.conversion.changing import changes_of  # reading a checkpoint needs no compiler

    return changes_of(source, given, own)


def _without(source: Side, changes: Changes | None) -> Side:
    """The source without dropped parameters, for a target's layout."""
    if changes is None or source.checkpoint is None:
        return source
    return evolve(source, checkpoint=changed_source(source.checkpoint, changes.gone))


def _changed(made: Side, source: Side, changes: Changes) -> Side:
    """The target, with first states of newly trained parameters."""
    from ucpl.conversion.changing import demand_acting, demand_left_out, demand_states_left_out
    from ucpl.conversion.grouping import demand_experts, fills_of_trained

    demand_acting(changes, made.layout)
    demand_left_out(changes, made.placement)
    demand_states_left_out(changes.drop, changes.origin, made.placement, source.placement)
    of = format_named(made.layout.framework)
    if of.has_engine and not of.is_of_any_ranks:
        demand_experts(source, changes.dealt.emptied)
        demand_layers(source.checkpoint, changes.gone, made.layout.settings.get("stage") == 1)
    begun = fills_of_trained(source, made.layout, changes.trained)
    layout = evolve(made.layout, fillings=(*made.layout.fillings, *begun))
    return evolve(made, placement=evolve(made.placement, layout=layout), changes=changes)


def _cut_as_deepspeed(one: Called, source: Side, given: Given, notes: tuple[Note, ...]) -> Side:
    """Place a layout, with DeepSpeed's cuts if its call leaves them open."""
    if given.model is None:
        return located(one, given, notes=notes)
    from ucpl.inference import layered, parallel, ranks
    from ucpl.placement.sharding import shardings_of

    base = parallel.Base(*one, given.model, given.inherited, given.config)
    of = one.format
    # Layers and experts have files of their own in DeepSpeed's folders alone.
    is_apart = not of.has_chunks and (
        (source.checkpoint is not None and ranks.is_apart(source.checkpoint))
        or layered.is_asked(evolve(base, inherited={}))
    )
    if not (parallel.is_open(*one) or (is_apart and parallel.says_cuts_alone(*one))):
        return located(one, given, notes=notes)
    made = of.target(base, source.checkpoint, source.layout)
    if made is None:
        made = ranks.target(base, source.checkpoint, shardings_of(source.layout))
    given = evolve(given, model=made.model or given.model)
    return located(Called(made.library, made.call), given, notes=(*notes, *made.notes))


def sides(
    source: Called | None, target: Called, given: Given, checkpoint: Checkpoint | None = None
) -> tuple[Side, Side]:
    """Both sides of a plan.

    A checkpoint's headers, or the given model, close layouts of any model. source: None if the layout is inferred from the
    checkpoint.
    """
    if checkpoint is not None:
        opened, did = apply_source_passes(OpenedSource(checkpoint, source, target, given))
        if given.folding is not None and _has_families(opened):
            given.folding.is_done = True
        else:
            given = evolve(given, folding=None)
        here = source_side(opened.checkpoint, opened.source, evolve(given, model=None))
        return evolve(here, passes=did), target_side(opened.target, here, given)
    assert source is not None
    given = evolve(given, folding=None)
    if given.model is None:  # a side with its own model gives the other its model
        named = next((one for one in (source, target) if not one.is_of_any), None)
        given = evolve(given, model=named.model(given) if named is not None else None)
    here = located(source, given)
    return here, target_side(target, here, given)


def _has_families(opened: OpenedSource) -> bool:
    """True if many tensors are worth families.

    A spec has folded them already, and files of a container speak of single ones.
    """
    is_spec = opened.source is not None and not opened.source.is_of_any
    alone = is_spec or opened.checkpoint.container is not None
    return not alone and len(opened.checkpoint.state.tensors) >= FAMILIES_FROM


def _notes_of(found: Found) -> tuple[Note, ...]:
    return tuple((name, size, origin) for name, (size, origin) in found.items())
