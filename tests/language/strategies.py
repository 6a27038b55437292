"""Hypothesis strategies for complete files of the language, and their parts.

Names are drawn from a small pool with words of the language and odd texts in it, so that collisions and quotes occur.
The files mean nothing: sizes, meshes and tensors are not made to fit each other.
"""

from __future__ import annotations

from attrs import evolve
from hypothesis import strategies as st

from ucpl.errors import UcplError
from ucpl.language import nodes
from ucpl.language.definitions import check_definitions
from ucpl.language.source import Source
from ucpl.language.words import ELEMENT_TYPES

PLAIN = ["a", "h", "g", "tp", "dp", "attn", "w_1", "_x", "value", "state", "as", "order", "flat", "each", "none", "all"]
ODD = ["blocks.0.w", "0", "a b", 'say "x"', "back\\slash", "two\nlines", "naïve", "a.*", "{l}", "#no", "=", "("]
COMPARISONS = ["==", "!=", "<=", ">=", "<", ">"]

plain = st.sampled_from(PLAIN)
dotted = st.lists(plain, min_size=1, max_size=3).map(".".join)
names = st.one_of(plain, st.sampled_from(ODD))
paths = st.one_of(dotted, names)
element_types = st.sampled_from(sorted(ELEMENT_TYPES))
texts = st.one_of(st.sampled_from([*ODD, "", "mp_rank_{tp:02}.pt"]), st.text(max_size=8))
integers = st.integers(0, 2**63 - 1) | st.integers(0, 9)


def some(elements: st.SearchStrategy, least: int = 1, most: int = 3) -> st.SearchStrategy:
    return st.lists(elements, min_size=least, max_size=most).map(tuple)


leaves = st.one_of(st.builds(nodes.Number, integers), st.builds(nodes.Text, texts), st.builds(nodes.Name, dotted))
exprs: st.SearchStrategy[nodes.Expr] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(nodes.Function, plain, some(inner)),
        st.builds(nodes.List, some(inner, 0)),
        st.builds(nodes.Unary, st.sampled_from(["-", "not"]), inner),
        st.builds(nodes.Binary, st.sampled_from(["+", "-", "*", "/", "%", "and", "or", *COMPARISONS]), inner, inner),
    ),
    max_leaves=6,
)
maybe = st.none() | exprs

splits = st.one_of(
    st.builds(nodes.Split, names),
    st.builds(nodes.Split, names, st.just("sizes"), some(exprs)),
    st.builds(nodes.Split, names, st.sampled_from(["chunk", "spread"]), st.just(()), maybe),
)
ranges = st.builds(nodes.Range, maybe, maybe, maybe)
bounds = st.none() | st.builds(nodes.Among, some(ranges | exprs), st.booleans()).filter(
    lambda a: not (a.others and isinstance(a.items[0], nodes.Range) and a.items[0].start is None)  # `not ..5` is `5..`
)
axis_leaves = st.one_of(
    st.builds(nodes.Dim, dotted, bounds), st.builds(nodes.Any_, bounds), st.builds(nodes.Each), st.builds(nodes.Rest)
)


def _axes_of(inner: st.SearchStrategy[nodes.Axis]) -> st.SearchStrategy[nodes.Axis]:
    terms = st.builds(nodes.Term, st.none() | paths, some(inner))
    uncut = inner.filter(lambda axis: not isinstance(axis, nodes.Cut))
    return st.one_of(
        st.builds(nodes.Stack, some(terms)),
        st.builds(nodes.Pad, inner, exprs, st.sampled_from(["zero", "live", "undefined"])),
        st.builds(nodes.Trim, inner),
        st.builds(nodes.Flat, inner),
        st.builds(nodes.Cut, uncut, some(splits, 1, 2)),
    )


axes: st.SearchStrategy[nodes.Axis] = st.recursive(axis_leaves, _axes_of, max_leaves=5)
shapes = some(axes, 0)
indices = some(axes, 0, 2)

calls = st.builds(
    lambda name, plain_values, named: nodes.Call(
        name,
        (*(nodes.Argument(None, v) for v in plain_values), *(nodes.Argument(n, v) for n, v in named.items())),
    ),
    names,
    some(exprs, 0, 2),
    st.dictionaries(names, exprs, max_size=2),
)


def bindings(least: int = 1) -> st.SearchStrategy:
    return st.dictionaries(names, exprs, min_size=least, max_size=3).map(
        lambda d: tuple(nodes.Binding(k, v) for k, v in d.items())
    )


once = {
    "on": names.map(lambda n: (n,)),
    "in": names.map(lambda n: (n,)),
    "as": texts.map(lambda t: (t,)),
    "dtype": element_types.map(lambda n: (n,)),
    "lossy": st.just(()),
    "exact": st.just(()),
    "value": exprs.map(lambda e: (e,)),
    "when": exprs.map(lambda e: (e,)),
    "buckets": exprs.map(lambda e: (e,)),
}
repeated = st.one_of(
    st.builds(
        lambda policy, mesh: nodes.Clause("copies", (policy, mesh)),
        st.sampled_from(["same", "mean", "sum", "max", "any"]),
        some(names),
    ),
    st.builds(lambda axis, place: nodes.Clause("at", (axis, place)), names, exprs),
)
clauses = (
    st.builds(
        lambda single, more: (*(nodes.Clause(word, args) for word, args in single.items()), *more),
        st.fixed_dictionaries({}, optional=once),
        some(repeated, 0, 2),
    )
    .flatmap(st.permutations)
    .map(tuple)
)

dimensions = st.one_of(
    st.builds(nodes.Dimension, dotted, st.none(), bounds),
    st.builds(lambda size: nodes.Dimension(None, size), integers),
)
groups = st.one_of(
    st.builds(nodes.Group, names, indices, some(paths), order=st.none() | st.just("reversed") | exprs),
    st.builds(nodes.Group, names, indices, st.none(), some(names, 0), order=st.none() | exprs),
    st.builds(nodes.Group, names, indices, st.none(), st.none(), st.tuples(names, texts)),
    st.builds(lambda order: nodes.Group("*", of_model=True, order=order), st.none() | exprs),
)
lets = st.builds(nodes.Let, bindings())
sized = st.builds(lambda of, by: tuple(evolve(b, by=by) for b in of), bindings(), st.none() | names)
dims = st.builds(nodes.Dims, sized)
asserts = st.builds(nodes.Assert, exprs, st.none() | texts)
ranks = st.builds(lambda axis, place: nodes.Clause("at", (axis, place)), names, exprs)
uses = st.builds(nodes.Use, calls, names, st.none() | texts, some(ranks, 0, 2))
indexes = st.builds(nodes.Index, names, axes, maybe)

model_items = st.one_of(
    lets,
    dims,
    asserts,
    uses,
    indexes,
    groups,
    st.builds(nodes.DefaultDtype, element_types),
    st.builds(
        nodes.Tensor,
        paths,
        some(dimensions, 0),
        st.none() | element_types,
        st.sampled_from(["parameter", "buffer", "frozen"]),
        maybe,
    ),
    st.builds(
        lambda path, dims, of, by, when: nodes.Tensor(path, dims, None, "frozen", when, nodes.Scaling(of, by)),
        paths,
        some(dimensions, 0),
        paths,
        some(exprs),
        maybe,
    ),
    st.builds(nodes.Alias, paths, paths, maybe),
    st.builds(nodes.State, some(names), element_types, st.just(True), st.none() | some(names) | st.just(("*",))),
    st.builds(
        nodes.State,
        some(names),
        element_types,
        st.just(False),
        st.none() | some(names) | st.just(("*",)),
        some(st.builds(nodes.TypedOf, element_types, some(paths)), 0),
    ),
)
layout_items = st.one_of(
    lets,
    dims,
    asserts,
    uses,
    indexes,
    groups,
    st.builds(nodes.Mesh, st.just("") | names, st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)),
    st.builds(nodes.Files, names, plain.filter(lambda w: w != "none"), texts, st.none() | texts, maybe),
    st.builds(nodes.Files, names, st.none(), when=maybe),
    st.builds(nodes.Framework, calls),
    st.builds(nodes.Entry, paths, indices, st.none() | shapes, clauses),
    st.builds(
        lambda runs, shape, of: nodes.Entry("*".join(runs), (), shape, (), of, runs),
        some(st.sampled_from(["", "a", ".to_q.", "x*y", 'say "x"', "back\\slash"]), 2, 4).filter(any),
        st.none() | shapes,
        st.sampled_from([None, "trainable", "buffer", "alias"]),
    ),
    st.builds(
        nodes.Entry,
        st.just("*"),
        indices,
        shapes,
        clauses,
        st.sampled_from([None, "parameter", "trainable", "frozen", "buffer", "alias"]),
    ),
    st.builds(
        nodes.States,
        st.none() | some(names),
        st.none() | some(names) | st.just(("*",)),
        st.none() | st.just("like") | shapes,
        clauses,
    ),
    st.builds(nodes.Derive, names, names, maybe),
    st.builds(nodes.Fill, paths, indices, exprs, when=maybe),
    st.builds(nodes.Fill, st.just("*"), indices, exprs, st.sampled_from([None, "parameter", "buffer"]), when=maybe),
    st.builds(nodes.FillStates, st.none() | some(names), st.none() | some(names) | st.just(("*",)), exprs, maybe),
    st.builds(nodes.Blob, paths, some(names, 0), st.sampled_from(["keep", "first", "remap", "drop"]), clauses),
)

parameters = st.dictionaries(names, maybe, max_size=3).map(
    lambda d: tuple(nodes.Parameter(name, default) for name, default in d.items())
)
statements = st.one_of(
    lets,
    asserts,
    st.builds(nodes.Import, texts, some(names)),
    st.builds(
        nodes.Plan, names, calls, calls, some(paths, 0), some(paths, 0), some(st.tuples(paths, st.none() | names), 0)
    ),
    st.builds(nodes.Model, names, some(model_items, 0, 5)),
    st.builds(nodes.Layout, names, parameters, names, st.none() | calls, some(layout_items, 0, 5)),
)


def _defined_once(file: nodes.File) -> bool:
    """Check that no name is defined twice; other files are rightly refused."""
    try:
        check_definitions(file, Source("", ""))
    except UcplError:
        return False
    return True


@st.composite
def files(draw: st.DrawFn) -> nodes.File:
    """A complete file that is not refused."""
    return draw(_files)


_files = st.builds(lambda items: nodes.File("<text>", 1, items), some(statements, 0, 4)).filter(_defined_once)
