"""Tensors on model-parallel ranks as a layout: tp, pipeline stages, and experts.

Each of these is a separate fact (parallel, stages, experts), and a layout combines those of a checkpoint: first the
lines of all tensors, then those of experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.inference import experts, layered, parallel, stages, vocabulary
from ucpl.inference.parallel import LAYERED, STORED, TARGET, Base, Cuts, Extended, Note
from ucpl.language import nodes
from ucpl.layout import resolve
from ucpl.placement.sharding import TP, shardings_of

if TYPE_CHECKING:
    from ucpl.extents.pipeline import Pipeline
    from ucpl.files.checkpoint import Checkpoint


def stored(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of a checkpoint whose files give the places of tensors.

    Raises: UcplError E464 if they do not.
    """
    cuts: Cuts = checkpoint.state.parallel.shardings if parallel.is_cut(checkpoint) else vocabulary.padded(checkpoint)
    return _stored(base, checkpoint, cuts)


def described(base: Base, checkpoint: Checkpoint) -> Extended:
    """The layout of a checkpoint with cuts from the base.

    The files give the stages and ranks. Raises: UcplError E464 if the base lacks the cut of a tensor.
    """
    more = vocabulary.padded(checkpoint)
    seen = evolve(base, model=vocabulary.with_rows(base.model, {path: one.rows for path, one in more.items()}))
    cuts = {**_own_cuts(seen), **more}
    chain = base.library.chain(base.call.name)
    if all(isinstance(item, nodes.Entry) for link in chain[:-1] for item in link.node.items):
        # Its cuts are known now: use the layout that it extends, which has all axes.
        base = evolve(base, call=nodes.Call(chain[-1].node.name))
    return _stored(base, checkpoint, cuts)


def _own_cuts(base: Base) -> Cuts:
    """The cuts of tensors in the base itself."""
    layout = resolve(base.library, base.call, model=base.model, config=base.config, inherited=base.inherited)
    return {path: evolve(one, origin=f"layout {base.call.name}") for path, one in shardings_of(layout).items()}


def is_apart(checkpoint: Checkpoint) -> bool:
    """Test whether a checkpoint's files give stages or experts.

    A layout with cuts need not have these.
    """
    return checkpoint.state.parallel.pipeline is not None or checkpoint.state.parallel.experts is not None


def _stored(base: Base, checkpoint: Checkpoint, cuts: Cuts) -> Extended:
    pipeline, held = checkpoint.state.parallel.pipeline, checkpoint.state.parallel.experts
    parallel.demand(cuts, checkpoint)
    notes: tuple[Note, ...] = parallel.origins(cuts)
    if pipeline is not None:
        notes += stages.notes_of(pipeline)
    dealt = None if held is None else experts.DealtExperts.of(held, held.ep, pipeline, is_stored=True)
    return evolve(_made(base, cuts, pipeline, dealt, STORED), notes=notes)


def target(base: Base, source: Checkpoint | None, cuts: Cuts) -> Extended:
    """The layout of a target with a shipped name, at its degrees.

    cuts: of the source's tensors. Raises: UcplError E472, E473, E475-E478 if the places of tensors there are unknown or
    impossible.
    """
    want = vocabulary.asked(base, source) if source is not None else None
    base = evolve(base, call=vocabulary.without(base.call))
    held = source.state.parallel.experts if source is not None else None
    pipeline = source.state.parallel.pipeline if source is not None else None
    asked = Label("<call>", where=base.call.name)
    of_names: tuple[Note, ...] = ()
    if pipeline is None and layered.is_asked(evolve(base, inherited={})):
        base, pipeline, of_names = layered.of_names(base, source)
    if pipeline is not None and not _is_pipelined(base, source):  # the same tensors in a module that is no pipeline
        if evolve(base, inherited={}).asked("pp") > 1 or stages.is_dealt(base):
            fail(
                "E477",
                f"`{base.call.name}` for a PipelineModule, which DeepSpeed trains at ZeRO stage 0 or 1",
                asked,
                remedy=f"zero1(...) with these stages; or {base.call.name}(...) without pp and stages, for one module of the"
                " same names",
            )
        base, pipeline = stages.with_argument(base, "pp", 1), None
    notes: tuple[Note, ...] = ()
    of_cuts: tuple[Note, ...] = ()
    ep, of_experts = 1, None
    if held is not None:
        base, of_experts, ep, notes = experts.degree_of(base, held)
    if pipeline is not None:
        base, pipeline, of_layers = stages.dealt(base, pipeline, ep)
        notes = (*of_names, *of_layers, *notes)
    if parallel.says_cuts_alone(base.library, base.call):
        rows = (
            dict.fromkeys(source.state.parallel.vocabulary, want.rows)
            if want is not None and source is not None
            else {}
        )
        cuts, of_cuts = _own_cuts(evolve(base, model=vocabulary.with_rows(base.model, rows))), ()
    else:
        if source is not None and not parallel.is_cut(source):
            cuts = cuts or source.state.parallel.shardings  # how its tensors would be cut, if they were
        base, cuts, of_cuts = _dealt(base, cuts)
    if want is not None and source is not None:
        of_words, told = vocabulary.dealt(want, source, base.asked(TP))
        cuts, of_cuts = {**cuts, **of_words}, (*of_cuts, *told)
    if pipeline is not None and base.asked(TP) > 1:
        pipeline = evolve(pipeline, is_by_tp=True)
    dealt = None if of_experts is None else experts.DealtExperts.of(of_experts, ep, pipeline)
    return evolve(_made(base, cuts, pipeline, dealt, TARGET), notes=(*of_cuts, *notes), model=base.model)


def _is_pipelined(base: Base, source: Checkpoint | None) -> bool:
    """Test whether a target is a pipeline.

    Without ZeRO it is one if the call has stages, or if the source is without ZeRO, too.
    """
    match stages.stage_of(base):
        case 1:
            return True
        case 0:
            stage = source.state.settings.get("stage") if source is not None else None
            is_said = any(a.name == "pp" for a in base.call.arguments) or stages.is_dealt(base)
            return is_said or (stage is not None and stage.value == 0)
        case _:
            return False


def _dealt(base: Base, cuts: Cuts) -> tuple[Base, Cuts, tuple[Note, ...]]:
    """Cuts at the call's degree.

    The source's, or those of its config's class.
    """
    if not cuts and parallel.names_a_class(base):
        from ucpl.inference import autotp  # a class of transformers is asked

        return autotp.dealt(base)
    return parallel.dealt(base, cuts)


def _made(base: Base, cuts: Cuts, pipeline: Pipeline | None, dealt: experts.DealtExperts | None, name: str) -> Extended:
    """A layout that extends the called one by lines of unusual tensors."""
    first = name if dealt is None else LAYERED
    made = Extended(base.library, base.call)
    if pipeline is not None:
        made = stages.pipelined(base, pipeline, cuts, first)
    elif cuts:
        whole = {path: one for path, one in cuts.items() if dealt is None or path not in dealt.experts.of}
        made = parallel.cut(base, whole, first)
    if dealt is not None:
        made = experts.with_experts(evolve(base, library=made.library, call=made.call), dealt, cuts, name)
    return made
