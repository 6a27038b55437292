"""A plan of tensor parallelism of transformers' classes: modules and their cuts."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ucpl.inference.autotp.drawn import Drawn, refuse
from ucpl.inference.autotp.vocabulary import Head, head_of
from ucpl.inference.hf.modules import EMBEDDING, Module
from ucpl.records import frozen

__all__ = ["by_plan"]

# Styles that DeepSpeed implements, and their effect on a module's weight (module_inject/tp_plan_converter.py).
_COLUMN, _ROW, _WHOLE = "column", "row", "whole"
_STYLES = {
    "colwise": _COLUMN,
    "colwise_rep": _COLUMN,
    "colwise_gather_output": _COLUMN,
    "rowwise": _ROW,
    "replicated_with_grad_allreduce": _WHOLE,
    "embedding_rowwise": _WHOLE,
}
_GATHERED = ("colwise_rep", "colwise_gather_output")
_BY_ROWS = "embedding_rowwise"
_PATTERN_CHARACTERS_MAX = 400
_REMEDY = (
    "DeepSpeed needs a tensor_parallel.partition_config of yours for this model: say the same cuts in a layout of your own"
    " that extends zero1, and give it with --to 'FILE.ucpl:NAME(tp=N)'"
)


@frozen
class _Line:
    """One line of a plan."""

    pattern: str
    style: str
    origin: str
    names: re.Pattern[str]  # of weights, from the start of the name

    @property
    def does(self) -> str:
        return _STYLES[self.style]

    @property
    def said(self) -> str:
        return f"{self.style} of {self.pattern}, {self.origin}"


def by_plan(drawn: Drawn) -> None:
    """Cuts of a network that has a plan.

    Raises: UcplError E472 if DeepSpeed rejects the plan, too.
    """
    network = drawn.network
    lines = [_line(pattern, style, network.origins[pattern]) for pattern, style in network.plan.items()]
    unknown = sorted({line.style for line in lines if line.style not in _STYLES})
    if unknown:
        first = next(line for line in lines if line.style == unknown[0])
        refuse(
            f"{first.origin} says `{first.style}` of {first.pattern}: DeepSpeed knows no such style, and refuses the model"
            f" (of {len(lines)} lines it does not know: {', '.join(unknown)})",
            first.pattern,
            remedy=_REMEDY,
        )
    wanted = drawn.asked.vocabulary
    if wanted is None:
        wanted = any(line.style == _BY_ROWS for line in lines) and _has_tied_head(drawn)
    head = head_of(drawn, is_asked=drawn.asked.vocabulary is True) if wanted else None
    if head is not None:
        head.cut(drawn, next((line.said for line in lines if line.style == _BY_ROWS), "vocab_parallel_lm_head"))
    whole = _tied_and_gathered(drawn, lines, head)
    for path, module in _matrices(network.root):
        line = next((line for line in lines if line.names.match(f"{path}.weight")), None)
        if line is None or line.does == _WHOLE or path in whole or (head is not None and path in head.modules):
            continue
        if module.role == EMBEDDING:
            _embedding(drawn, path, module, line)
        elif line.does == _ROW:
            drawn.row(path, module, path, line.said)
        else:
            drawn.column(path, module, path, line.said)


def _line(pattern: str, style: str, origin: str) -> _Line:
    if len(pattern) > _PATTERN_CHARACTERS_MAX or pattern.count("*") > 4:
        refuse(f"a pattern that may take too long to match: {pattern[:80]}", origin)
    text = re.escape(pattern).replace(r"\*", ".*")
    end = "$" if text.endswith(r"\.weight") else r"\.weight$"
    return _Line(pattern, style.lower(), origin, re.compile(f".*{text}{end}"))


def _matrices(root: Module) -> Iterator[tuple[str, Module]]:
    """Modules with a weight of two dims, and embeddings, without their submodules."""

    def below(path: str, module: Module) -> Iterator[tuple[str, Module]]:
        for child in module.children:
            here = f"{path}.{child.name}" if path else child.name
            if child.role == EMBEDDING or child.is_matrix:
                yield here, child
            else:
                yield from below(here, child)

    yield from below("", root)


def _embedding(drawn: Drawn, path: str, module: Module, line: _Line) -> None:
    name = f"{path}.weight"
    if name in drawn.network.owners or name in drawn.network.owners.values():
        refuse(f"{line.said}: DeepSpeed would cut the embedding, and untie the tensors that share `{name}`", name)
    drawn.row(path, module, path, line.said)


def _has_tied_head(drawn: Drawn) -> bool:
    network = drawn.network
    embeddings = {network.owner(f"{p}.weight") for p, m in network.root.walk() if m.role == EMBEDDING}
    return any(network.owner(f"{path}.weight") in embeddings for path, _ in Head.candidates(network))


def _tied_and_gathered(drawn: Drawn, lines: list[_Line], head: Head | None) -> set[str]:
    """Modules that are not cut: a gathered head, and its tied embedding.

    The output of a gathered head is joined on all ranks.
    """
    network = drawn.network
    every = {path: m for path, m in network.root.walk() if "weight" in m.shapes}
    inputs = {path for path, m in every.items() if m.role == EMBEDDING} | ({network.inputs} & set(every))
    out: set[str] = set()
    for path, module in every.items():
        tied = {p for p in inputs if network.owner(f"{p}.weight") == network.owner(f"{path}.weight")}
        line = next((line for line in lines if line.names.match(f"{path}.weight")), None)
        is_gathered = line is not None and line.style in _GATHERED
        if module.role != EMBEDDING and tied and is_gathered and (head is None or path not in head.modules):
            out |= {path, *tied}
    return out
