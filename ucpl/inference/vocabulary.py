"""Padded rows of a vocabulary, whose number depends on the tensor-parallel degree.

Megatron pads a vocabulary to a multiple of `make_vocab_size_divisible_by` x tp; training changes these rows as it does
others. If a checkpoint has the number of words and the tensors that hold them (`original_vocab_size` and
`vocabulary_parameter_patterns` of universal_checkpoint_info), a call may request other rows: `padded_vocab = 50304`, or
Megatron's own argument. The common rows are the model's; further rows of the source are trained padding that is left
behind, and further rows of the target are zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, fail
from ucpl.extents import Section, Sharding
from ucpl.inference.parallel import Base, Note, chunked
from ucpl.language import nodes
from ucpl.layout.expand import items_of
from ucpl.layout.scope import Scope
from ucpl.placement.sharding import TP
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.files.checkpoint import Checkpoint

ROWS, DIVISOR = "padded_vocab", "make_vocab_size_divisible_by"


@frozen
class RequestedRows:
    """Rows that a target is to have, and why."""

    rows: int
    origin: str


def asked(base: Base, source: Checkpoint) -> RequestedRows | None:
    """The rows that a target's call requests.

    Raises: UcplError E479.
    """
    said = {a.name: a.value for a in base.call.arguments if a.name in (ROWS, DIVISOR)}
    if not said:
        words = max(source.state.parallel.vocabulary.values(), default=0)
        padded = any(
            t.shape[:1] > (source.state.parallel.vocabulary.get(t.name, t.shape[0]),)
            for t in source.state.tensors
            if t.shape
        )
        return (
            RequestedRows(words, "a loader of universal folders pads anew") if padded and is_universal(base) else None
        )
    name = next(iter(said))
    number = Scope().integer(said[name])
    where = Label("<call>", where=f"{name} = {number}")
    if not source.state.parallel.vocabulary:
        fail(
            "E479",
            f"`{base.call.name}` with {name}: the source does not name the tensors with a row for each word",
            where,
            Label(str(source.root)),
        )
    words = max(source.state.parallel.vocabulary.values())
    rows = number if name == ROWS else _padded(words, number * base.asked(TP)) if number > 0 else 0
    if rows < words:
        fail("E479", f"{words} words do not fit into {rows} rows", where, Label(str(source.root), f"{words} words"))
    return RequestedRows(rows, "given" if name == ROWS else f"{DIVISOR} = {number}, times tp")


def is_universal(base: Base) -> bool:
    """Test whether tensors are stored completely, and a loader adds rows."""
    items = items_of(base.library, base.call)
    return any(isinstance(item, nodes.Framework) and format_named(item.call.name).is_of_any_ranks for item in items)


def _padded(words: int, multiple: int) -> int:
    return -(-words // multiple) * multiple


def without(call: nodes.Call) -> nodes.Call:
    """A call without arguments on rows, which no layout has."""
    return evolve(call, arguments=tuple(a for a in call.arguments if a.name not in (ROWS, DIVISOR)))


def lessened(source: Checkpoint, rows: int) -> Checkpoint:
    """The source as one whose further rows are padding that is live."""
    kept = {
        t.name: min(rows, t.shape[0])
        for t in source.state.tensors
        if t.name in source.state.parallel.vocabulary and t.shape
    }
    shapes = {t.name: t.shape for t in source.state.tensors}
    cuts = dict(source.state.parallel.shardings)
    for name, n in kept.items():
        held = source.state.parallel.local_shapes.get(name, (shapes[name],))
        if n < shapes[name][0]:
            section = Section(shapes[name][0], tuple(shape[0] for shape in held))
            cuts[name] = Sharding((n, *shapes[name][1:]), 0, (section,), "rows behind those that the target keeps")
    tensors = tuple(
        evolve(t, shape=(kept.get(t.name, t.shape[0]), *t.shape[1:])) if t.shape else t for t in source.state.tensors
    )
    parallel = evolve(source.state.parallel, shardings=cuts)
    return evolve(source, state=evolve(source.state, tensors=tensors, parallel=parallel))


def padded(source: Checkpoint) -> dict[str, Sharding]:
    """Tensors with more rows than the model has."""
    return {
        name: one for name, one in source.state.parallel.shardings.items() if one.dim == 0 and one.rows > one.shape[0]
    }


def with_rows(model: nodes.Model, rows: Mapping[str, int]) -> nodes.Model:
    """The model with padded rows in these tensors."""
    items = tuple(
        evolve(item, dims=(nodes.Dimension(None, rows[item.path]), *item.dims[1:]))
        if isinstance(item, nodes.Tensor) and item.path in rows
        else item
        for item in model.items
    )
    return evolve(model, items=items)


def dealt(want: RequestedRows, source: Checkpoint, degree: int) -> tuple[dict[str, Sharding], tuple[Note, ...]]:
    """Padded and cut tensors of words in a target, with notes."""
    out = {}
    for tensor in source.state.tensors:
        if tensor.name in source.state.parallel.vocabulary and tensor.shape:
            if tensor.shape[0] > want.rows:
                fail(
                    "E479",
                    f"the layout that describes the source gives `{tensor.name}` {tensor.shape[0]} rows, more than {want.rows}",
                    Label("<call>", where=f"{want.rows} rows"),
                    Label(str(source.root), where=tensor.name),
                )
            section = Section(want.rows, chunked(want.rows, degree))
            out[tensor.name] = Sharding(tensor.shape, 0, (section,), want.origin)
    words = max(source.state.parallel.vocabulary.values())
    return out, (("rows of the vocabulary", f"{want.rows}, {words} of them are words", want.origin),)
