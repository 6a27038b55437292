"""Check that a checkpoint's bytes and values are complete and consistent."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ucpl.errors import Diagnostic, Label, UcplError, catalogue
from ucpl.extents import Seen, together
from ucpl.files.checkpoint import Checkpoint
from ucpl.files.scalars import number_of
from ucpl.graph import build
from ucpl.lint.swappable_parts import SwappableParts, swappable_parts, swappable_text
from ucpl.placement import Placement
from ucpl.planning import Runs, order
from ucpl.records import frozen
from ucpl.runtime.compare import Comparison
from ucpl.runtime.source_checks import check_padding
from ucpl.runtime.verify import Verified, verify_files
from ucpl.verification.blobs import find_wrong_copies
from ucpl.verification.elements import Elements, counted
from ucpl.verification.evidence import (
    Evidence,
    EvidenceRequest,
    masters,
    stated_orders,
    stored_differently,
    transformers_class,
)
from ucpl.verification.masters import dtype_of, weights_against_masters
from ucpl.verification.proof.reductions import replica_moves
from ucpl.verification.reference import ReferenceComparison
from ucpl.verification.target_check import compare_target

__all__ = ["Verdict", "verdict"]

WITNESS = (
    "not witnessed: the identity of each tensor and the order of its parts (q, k, v; gate, up) come from their names alone;"
    " only the framework's own model shows that training resumes"
)

NOT_COMPARED = (
    "not compared: copies, weights with masters, sums of integrity.json, the class of a config; `ucpl verify` without --quick"
    " compares them"
)

TWINS = "not witnessed: parts of one size, side by side:"
SAYS = {"agrees": "witnessed by", "contradicts": "contradicted by", "absent": "not witnessed by"}


@frozen
class Verdict:
    """The result of `verify`, true if nothing is wrong.

    `notes` list the comparisons that were made, and those that were not.
    """

    findings: tuple[Diagnostic, ...]
    files: Verified
    copied: int  # elements of declared copies (replicas, tied tensors) that were compared
    rounded: int  # weights that were compared with their masters
    notes: tuple[str, ...] = ()
    against: ReferenceComparison | None = None  # a genuine checkpoint, where one was given
    is_evidenced: bool = True  # whether a digest, a copy, a master or a witness could have shown a fault

    def __bool__(self) -> bool:
        return not self.findings and (self.against is None or bool(self.against))


def verdict(
    checkpoint: Checkpoint,
    placement: Placement,
    *,
    asked: EvidenceRequest | None = None,
    memory: int = 512 << 20,
    workers: int = 2,
    quick: float | None = None,
    folded: Callable[[], Placement] | None = None,
    single: Callable[[], Placement] | None = None,
) -> Verdict:
    """Verify an opened and located checkpoint. Its faults are findings, not errors.

    asked: which witnesses are called for the spec; None calls none but those that the checkpoint itself is.
    quick: seconds for reading. Only digests are compared then.
    folded: the placement with tensors that are stored alike as one. single: without families, if `placement` has some.
    """
    files = verify_files(checkpoint, memory=memory, workers=workers, seconds=quick)
    findings = [*checkpoint.state.issues, *files.findings]
    notes: list[str] = [*checkpoint.notes]
    if quick is not None:
        notes += [*_steps(checkpoint), NOT_COMPARED]
        is_evidenced = bool(files.bytes_read or files.manifest)
        return Verdict(tuple(findings), files, 0, 0, tuple(n for n in notes if n), is_evidenced=is_evidenced)
    copied = rounded = 0
    copies: Comparison | None = None
    held: Comparison | None = None
    try:
        first = placement if folded is None else folded()
        last = single or (lambda: placement)
        copies, found = _copies(checkpoint, first, last, memory, workers)
        copied = copies.elements if copies is not None else 0
        findings += found
        notes.append(_copies_text(copies))
        held, found = weights_against_masters(checkpoint, placement, memory, workers)
        rounded = held.elements if held is not None else 0
        findings += found
        notes.append("" if found else _masters_text(held))
    except UcplError as error:
        findings += error.diagnostics
    findings += find_wrong_copies(placement, checkpoint)
    notes += _steps(checkpoint)
    heard = [stated_orders(placement, checkpoint), masters(placement, held, findings)]
    if asked is not None and not findings:
        heard.append(transformers_class(asked.side, checkpoint, reference=asked.reference, forward=asked.forward))
        findings += [_contradiction(w, checkpoint) for w in heard[2:] if w.verdict == "contradicts"]
    for w in heard:
        notes.append(f"{SAYS[w.verdict]} {w.name}: {w.detail}")
        notes += [f"{SAYS['absent']} {w.name}: {text}" for text in w.unseen]
    if heard[-1].name != "transformers" or heard[-1].verdict != "agrees" or heard[-1].unseen:
        seen = stored_differently(placement) if heard[1].verdict == "agrees" else set()
        twins = tuple(t for t in swappable_parts(placement.layout) if not _is_shown(t, seen, held))
        notes += [f"{TWINS} {swappable_text(twins)}", WITNESS] if twins else [WITNESS]
    is_evidenced = bool(
        files.bytes_protected
        or any(w.verdict == "agrees" for w in heard)
        or any(c is not None and not c.doubt("values") for c in (copies, held))
    )
    said = tuple(n for n in notes if n)
    return Verdict(tuple(findings), files, copied, rounded, said, is_evidenced=is_evidenced)


def _is_shown(twins: SwappableParts, seen: set[str], held: Comparison | None) -> bool:
    """Return True if a swap of these parts would show.

    Weights and masters that are laid out in different ways would then differ.
    """
    if held is None or not seen.issuperset(twins.tensors):
        return False
    return together(held.seen.get(name, Seen()) for name in twins.tensors).varies


def _copies_text(copies: Comparison | None) -> str:
    if copies is None:
        return "no copies are kept: nothing to hold against each other"
    doubt = copies.doubt("elements of copies")
    equal = f"{copies.elements:,} elements of copies equal each other"
    return f"{equal}; {doubt}: that they are copies is not witnessed" if doubt else equal


def _masters_text(held: Comparison | None) -> str:
    if held is None:
        return "weights and masters are not both stored: nothing to hold against each other"
    doubt = held.doubt("weights")
    rounded = f"{held.elements:,} weights are their fp32 masters, rounded to nearest even"
    return f"{rounded}; {doubt}: that these are their masters is not witnessed" if doubt else rounded


def _contradiction(witness: Evidence, checkpoint: Checkpoint) -> Diagnostic:
    return Diagnostic(
        "E707",
        f"{witness.name} contradicts the spec: {witness.detail}",
        (Label(str(checkpoint.root), witness.what),),
        remedy=catalogue()["E707"].remedy,
    )


def _copies(
    checkpoint: Checkpoint, first: Placement, single: Callable[[], Placement], memory: int, workers: int
) -> tuple[Comparison | None, list[Diagnostic]]:
    """Compare with families first.

    A fault is found once more without them, so that it names a tensor.
    """
    if first.layout.families:
        try:
            copies, found = _compared(checkpoint, first, memory, workers)
        except UcplError:
            return _compared(checkpoint, single(), memory, workers)
        if not found:
            return copies, found
    return _compared(checkpoint, single(), memory, workers)


def _compared(
    checkpoint: Checkpoint, placement: Placement, memory: int, workers: int
) -> tuple[Comparison | None, list[Diagnostic]]:
    """Compare the places of elements that have more than one, and padding.

    The places are replicas and second names. Each copy is compared with the place that is read. Members of a mean may
    differ: each is compared with its own copies.
    """
    graph = build(placement, counted(placement), dtype_of=dtype_of(checkpoint))
    plan = order(graph, name="copies")
    padding = list(check_padding(plan, checkpoint, memory=memory))
    checks = tuple(_turned(m) for m in plan.moves if m.kind == "check")
    checks += tuple(replica_moves(placement, plan))
    if not sum(m.elements for m in checks):
        return None, padding
    back = plan.of(sources=plan.targets, targets=plan.sources, moves=checks)
    compared = compare_target(back, checkpoint, checkpoint, memory=memory, workers=workers)
    elements = Elements(placement)
    return compared, padding + [elements.finding("E700", u, "copies differ") for u in compared]


def _turned(m: Runs) -> Runs:
    """Moves from the place that is read to its copies.

    Every copy is filled once, so all are compared.
    """
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
    """Check that values per parameter are equal within each group."""
    out = []
    for state, values in checkpoint.state.scalars.items():
        for i, group in enumerate(checkpoint.state.groups):
            mine = [number_of(values[m]) for m in group.members if m in values]
            seen: list[object] = []
            for value in mine:
                if value not in seen:
                    seen.append(value)
            if len(mine) == 1:
                out.append(f"{state} is {seen[0]} for the one parameter of group {i}")
            elif len(seen) == 1:
                out.append(f"{state} is {seen[0]} for all {len(mine)} parameters of group {i}")
            elif seen:
                out.append(f"{state} differs within group {i}: {', '.join(map(str, seen[:8]))}")
    return out
