"""Why the model has no tensor of a name: left out by a condition, of a part or a model that is not this one, or an alias."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import evolve

from ucpl.errors import Diagnostic, UcplError, fail
from ucpl.layout.models import for_alias
from ucpl.layout.scope import at, nearest
from ucpl.layout.statements import Opened
from ucpl.syntax import nodes, print_expr

__all__ = ["say_why"]


def say_why(found: Diagnostic, name: str, opened: Opened, tensors: Iterable[str], aliases: Mapping[str, str]) -> None:
    """Raises E105 or E137 where more can be said than `found`, an E137, says."""
    _left_out(found, name, opened)
    _of_another_part(found, name, opened, tensors)
    _of_another_model(found, name, opened)
    if name in aliases:  # of a group's member that is no tensor by itself
        raise UcplError(evolve(found, remedy=for_alias(name, aliases))) from None


def _left_out(found: Diagnostic, name: str, opened: Opened) -> None:
    """Of a tensor that the model has under a condition that does not hold. Raises E137, or E105 where a config decides."""
    for item in opened.model_items:
        if not isinstance(item, nodes.Tensor | nodes.Alias) or item.when is None or item.path != name:
            continue
        condition = print_expr(item.when)
        open_now = opened.scope.lacks_config(item.when)
        fail(
            "E105" if open_now else "E137",
            f"`{item.path}` is in the model when {condition}, which {'has no value' if open_now else 'does not hold'}",
            *found.labels,
            at(item.span, "its condition"),
            remedy=("give the key in --config, or " if open_now else "")
            + f"put the condition behind this line, too: when {condition}",
        )


def _of_another_part(found: Diagnostic, name: str, opened: Opened, tensors: Iterable[str]) -> None:
    """Of a tensor of a layout that is used, where the model uses nothing under that name. Raises E137."""
    chain = opened.library.chain(opened.layout.name, opened.layout.span)
    known = {path.partition(".")[0] for path in tensors if "." in path}
    for use in [i for link in chain for i in link.node.items if isinstance(i, nodes.Use)]:
        if name.startswith(f"{use.name}.") and use.name not in known:
            parts = [i.name for i in opened.model.items if isinstance(i, nodes.Use)]
            close = nearest(use.name, parts)
            has = f"it uses {', '.join(parts)}" if parts else f"write `use ... as {use.name}` in the model, too"
            said = f"the model {opened.model.name} uses nothing as `{use.name}`"
            remedy = f"did you mean `{close}`?" if close else has
            fail("E137", said, at(use.span, "used here"), *found.labels, remedy=remedy)


def _of_another_model(found: Diagnostic, name: str, opened: Opened) -> None:
    """Of a tensor of a layout that is extended, and that is of a model on which this one does not stand. Raises E137."""
    node, library = opened.layout, opened.library
    for link in library.chain(node.name, node.span)[1:]:
        other = link.node.of
        paths = [i.path for i in link.node.items if isinstance(i, nodes.Entry)]
        if other not in (node.of, "any") and name in paths:
            bases = [] if node.of == "any" else library.models(library.model(node.of))
            if other not in [base.node.name for base in bases]:
                said = f"`{link.node.name}` is of {other}, and `{node.name}`, which extends it, of {node.of}"
                remedy = f"write `of {other}`" + (f", or let {node.of} extend {other}" if bases else "")
                fail("E137", said, at(node.span), *found.labels, remedy=remedy)
