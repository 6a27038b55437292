"""Is a checkpoint whole and consistent? All that vouches for its bytes, and all that its values must agree on."""

from __future__ import annotations

import numpy as np

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.graph import build
from ucpl.proofs.against import hold_against
from ucpl.proofs.blobs import unlike_copies
from ucpl.proofs.genuine import Against
from ucpl.proofs.masters import dtype_of, weights_against_masters
from ucpl.proofs.member_copies import copies_of_members
from ucpl.proofs.side_by_side import side_by_side, twins_text
from ucpl.proofs.where import counted, finding
from ucpl.proofs.witnesses import (
    NO_MASTERS,
    Asked,
    Witness,
    laid_otherwise,
    masters_say,
    stated_orders,
    transformers_class,
)
from ucpl.records import frozen
from ucpl.regions import Placement
from ucpl.runtime.evidence import check_padding
from ucpl.runtime.verify import Verified, verify_files
from ucpl.schedule import Runs, order
from ucpl.stores.checkpoint import Checkpoint
from ucpl.stores.scalars import number_of

__all__ = ["Verdict", "verdict"]

WITNESS = (
    "not witnessed: which tensor is which, and the order of its parts (q, k, v; gate, up), is as the names say;"
    " only the framework's own model shows that it trains on"
)

TWINS = "not witnessed: parts of one size, side by side:"
SAYS = {"agrees": "witnessed by", "contradicts": "contradicted by", "absent": "not witnessed by"}


@frozen
class Verdict:
    """What `verify` found. True where nothing is wrong; `notes` say what was held against what, and what was not."""

    findings: tuple[Diagnostic, ...]
    files: Verified
    copied: int  # elements of declared copies (replicas, tied tensors) that were compared
    rounded: int  # weights that were compared with their masters
    notes: tuple[str, ...] = ()
    against: Against | None = None  # a genuine checkpoint, where one was given

    def __bool__(self) -> bool:
        return not self.findings and (self.against is None or bool(self.against))


def verdict(
    checkpoint: Checkpoint,
    placement: Placement,
    *,
    asked: Asked | None = None,
    memory: int = 512 << 20,
    workers: int = 2,
) -> Verdict:
    """Verify an opened and located checkpoint. What is wrong with it is a finding, not an error.

    asked: which witnesses are called for the spec; None calls none but those that the checkpoint itself is.
    """
    files = verify_files(checkpoint, memory=memory, workers=workers)
    findings = [*checkpoint.amiss, *files.findings]
    notes: list[str] = [*checkpoint.told]
    copied = rounded = 0
    try:
        copied, found = _copies(checkpoint, placement, memory, workers)
        findings += found
        notes.append(
            f"{copied:,} elements of copies equal each other"
            if copied
            else "no copies are kept: nothing to hold against each other"
        )
        rounded, found = weights_against_masters(checkpoint, placement, memory, workers)
        findings += found
        notes.append(
            f"{rounded:,} weights are their fp32 masters, rounded to nearest even"
            if rounded and not found
            else ""
            if rounded
            else "weights and masters are not both stored: nothing to hold against each other"
        )
    except UcplError as error:
        findings += error.diagnostics
    findings += unlike_copies(placement, checkpoint)
    notes += _steps(checkpoint)
    heard = [stated_orders(placement, checkpoint), _masters_seen(placement, rounded, findings)]
    if asked is not None and not findings:
        heard.append(transformers_class(asked.side, checkpoint, reference=asked.reference, forward=asked.forward))
        findings += [_contradiction(w, checkpoint) for w in heard[2:] if w.verdict == "contradicts"]
    notes += [f"{SAYS[w.verdict]} {w.name}: {w.detail}" for w in heard]
    if heard[-1].name != "transformers" or heard[-1].verdict != "agrees":
        seen = laid_otherwise(placement) if heard[1].verdict == "agrees" else set()
        twins = tuple(t for t in side_by_side(placement.layout) if not seen.issuperset(t.tensors))
        notes += [f"{TWINS} {twins_text(twins)}", WITNESS] if twins else [WITNESS]
    return Verdict(tuple(findings), files, copied, rounded, tuple(n for n in notes if n))


def _masters_seen(placement: Placement, rounded: int, findings: list[Diagnostic]) -> Witness:
    """What comparing weights with masters has shown of the spec: nothing where both lie in one way, mistakes and all."""
    both = laid_otherwise(placement)
    if not both or not rounded:
        return masters_say("absent", NO_MASTERS)
    wrong = next((d for d in findings if d.code == "E701"), None)
    if wrong is not None:
        return masters_say("contradicts", wrong.message)
    return masters_say("agrees", f"weights of {len(both)} tensors are their masters, which lie in another way, rounded")


def _contradiction(witness: Witness, checkpoint: Checkpoint) -> Diagnostic:
    return Diagnostic(
        "E707",
        f"{witness.name} contradicts the spec: {witness.detail}",
        (Label(str(checkpoint.root), witness.what),),
        remedy=catalogue()["E707"].remedy,
    )


def _copies(checkpoint: Checkpoint, placement: Placement, memory: int, workers: int) -> tuple[int, list[Diagnostic]]:
    """Replicas and second names: the checkpoint against itself, where an element has more than one place. And padding.

    Each copy is held against the place that is read. Members of a mean may differ: what is held is each against its own copies.
    """
    graph = build(placement, counted(placement), dtype_of=dtype_of(checkpoint))
    plan = order(graph, name="copies")
    padding = list(check_padding(plan, checkpoint, memory=memory))
    checks = tuple(_turned(m) for m in plan.moves if m.kind == "check")
    checks += tuple(copies_of_members(placement, plan))
    count = sum(m.elements for m in checks)
    if not count:
        return 0, padding
    back = plan.of(sources=plan.targets, targets=plan.sources, moves=checks)
    compared = hold_against(back, checkpoint, checkpoint, memory=memory, workers=workers)
    return count, padding + [finding("E700", u, placement, "copies differ") for u in compared]


def _turned(m: Runs) -> Runs:
    """From the place that is read to its copy: every copy is filled once, so that each of several has its say."""
    by_stride = np.argsort(-m.source_stride, axis=1, kind="stable")
    shape, source, target = (
        np.take_along_axis(columns, by_stride, 1) for columns in (m.shape, m.target_stride, m.source_stride)
    )
    rows = np.lexsort((m.target, m.source_offset, m.source))
    return Runs(
        "copy",
        m.state,
        m.tensor[rows],
        m.target[rows],
        m.source[rows],
        shape[rows],
        m.target_offset[rows],
        source[rows],
        m.source_offset[rows],
        target[rows],
        m.target_value,
        m.source_value,
        m.lossy,
    )


def _steps(checkpoint: Checkpoint) -> list[str]:
    """What is one number a parameter: equal within each group, or said to differ."""
    out = []
    for state, values in checkpoint.envelope.scalars.items():
        for i, group in enumerate(checkpoint.envelope.groups):
            mine = [number_of(values[m]) for m in group.members if m in values]
            seen: list[object] = []
            for value in mine:
                if value not in seen:
                    seen.append(value)
            if len(seen) == 1:
                out.append(f"{state} is {seen[0]} for all {len(mine)} parameters of group {i}")
            elif seen:
                out.append(f"{state} differs within group {i}: {', '.join(map(str, seen[:8]))}")
    return out
