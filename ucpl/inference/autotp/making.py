"""A target's cuts at a tensor-parallel degree, from its config's class."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Sharding
from ucpl.inference.autotp.drawn import AutoTPOptions, Drawn, refuse
from ucpl.inference.autotp.policies import by_policies
from ucpl.inference.hf.modules import EMBEDDING, LINEAR, Module, Network
from ucpl.inference.hf.ties import with_ties
from ucpl.inference.parallel import GRAIN, KV_HEADS, Base, Cuts, Note, origins
from ucpl.language import nodes
from ucpl.layout.scope import Config, Scope
from ucpl.placement.sharding import TP
from ucpl.records import frozen

if TYPE_CHECKING:
    from ucpl.inference.hf.modules import Network

__all__ = ["cuts_of", "dealt", "Head", "head_of", "by_plan"]


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


_NAMES = ("lm_head", "embed_out")


@frozen
class Head:
    """path: of the head. modules: the head and embeddings with its weight."""

    path: str
    module: Module
    modules: frozenset[str]

    @staticmethod
    def candidates(network: Network) -> Iterator[tuple[str, Module]]:
        for path, module in network.root.walk():
            if module.role == LINEAR and module.name in _NAMES:
                yield path, module

    def cut(self, drawn: Drawn, said: str) -> None:
        tied = sorted(self.modules - {self.path})
        more = f" with {', '.join(tied)}" if tied else ""
        drawn.column(self.path, self.module, self.path, f"{self.path}{more} by the vocabulary: {said}")


def head_of(drawn: Drawn, *, is_asked: bool) -> Head | None:
    """The head whose logits are parts of the vocabulary on each rank.

    None: DeepSpeed cuts neither it nor its embedding.

    is_asked: DeepSpeed's config requests this, and DeepSpeed stops if it cannot do it. Raises: UcplError E472.
    """
    network = drawn.network
    found = list(Head.candidates(network))
    why = _why_not(drawn, found)
    if why and is_asked:
        refuse(f"vocab_parallel_lm_head: {why}", "vocab_parallel_lm_head")
    if why:
        return None
    ((path, module),) = found
    weight = network.owner(f"{path}.weight")
    tied = {p for p, m in network.root.walk() if m.role == EMBEDDING and network.owner(f"{p}.weight") == weight}
    return Head(path, module, frozenset({path, *tied}))


def _why_not(drawn: Drawn, found: list[tuple[str, Module]]) -> str:
    network = drawn.network
    if len(found) != 1:
        return f"{len(found)} linear modules are called {' or '.join(_NAMES)}"
    ((path, module),) = found
    weight = network.owner(f"{path}.weight")
    for name, one in network.root.walk():
        if one.role == EMBEDDING and network.owner(f"{name}.weight") == weight and not one.is_plain:
            return f"the embedding {name} is a {one.class_name}, which does more than look rows up"
    if 0 in drawn.widths(module.shapes["weight"][0], path):
        return f"{module.shapes['weight'][0]} rows of {path} are too few"
    return "" if network.takes_loss else "the class has no loss that can be replaced"


VOCABULARY = "vocab_parallel_lm_head"  # in DeepSpeed's config, with autotp_size
_WITHOUT_CLASS = (
    "AutoTP cuts a model by its class, which files do not hold: install a transformers that has it next to ucpl (pip install"
    " transformers); or say the cuts in a layout of your own that extends zero1: --to 'FILE.ucpl:NAME(tp=2)'"
)
_ARGUMENTS = (KV_HEADS, GRAIN, VOCABULARY)


def dealt(base: Base) -> tuple[Base, Cuts, tuple[Note, ...]]:
    """AutoTP's cuts of a class, their origins, and the plain base.

    Its model has second names that the class ties and the source lacks: DeepSpeed requests all names of a module.

    Raises: UcplError E396 if the class cannot be made, E472 if DeepSpeed cannot cut it or the config is of another
    model, E473 if a rank would hold nothing.
    """
    assert base.config is not None
    network = _network_of(base.config)
    call = base.call
    given = {a.name: Scope().integer(a.value) for a in call.arguments if a.name in _ARGUMENTS}
    plain = evolve(base, call=evolve(call, arguments=tuple(a for a in call.arguments if a.name not in _ARGUMENTS)))
    _check_this_model(plain, network)
    heads = (given[KV_HEADS], "given") if KV_HEADS in given else (network.heads.kv, network.heads.kv_key)
    inherited, origin = plain.inherited.get(GRAIN, (1, "DeepSpeed's default"))
    grain = (given[GRAIN], "given") if GRAIN in given else (inherited if isinstance(inherited, int) else 1, origin)
    vocabulary = bool(given[VOCABULARY]) if VOCABULARY in given else None
    cuts = cuts_of(network, AutoTPOptions(plain.asked(TP), heads[0], max(1, grain[0]), vocabulary))
    model, ties = with_ties(plain.model, network)
    plain = evolve(plain, model=model)
    whole = sum(s.dim is None for s in cuts.values())
    notes: tuple[Note, ...] = (
        (KV_HEADS, heads[0], heads[1] or f"{network.root.class_name}'s config names none"),
        (GRAIN, *grain),
        *origins(cuts),
        ("whole", f"{whole} tensors", "no rule names them: a copy on every rank"),
        *ties,
    )
    return plain, cuts, notes


def _network_of(config: Config) -> Network:
    """The class that a config names. Raises: UcplError E396."""
    from ucpl.inference.hf.networks import network_of

    try:
        return network_of(dict(config))
    except UcplError as error:
        first, *more = error.diagnostics
        if first.code != "E396":
            raise
        raise UcplError(evolve(first, remedy=_WITHOUT_CLASS), *more) from None


def cuts_of(network: Network, asked: AutoTPOptions) -> dict[str, Sharding]:
    """Every parameter of a class, cut or complete, by its first name.

    Raises: UcplError E472, E473.
    """
    drawn = Drawn(network, asked)
    if network.plan:
        by_plan(drawn)
    else:
        by_policies(drawn)
        if asked.vocabulary:
            head = head_of(drawn, is_asked=True)
            assert head is not None
            head.cut(drawn, VOCABULARY)
    _check_some_on_every_rank(drawn)
    return {name: drawn.cuts.get(name, Sharding(shape)) for name, shape in network.shapes.items()}


def _check_some_on_every_rank(drawn: Drawn) -> None:
    """Check that every rank has a part of each cut tensor.

    DeepSpeed runs with empty ranks, but such a checkpoint is not written. Raises: UcplError E473.
    """
    degree = drawn.asked.degree
    for name, s in drawn.cuts.items():
        empty = next((rank for rank in range(degree) if not s.width(rank)), None)
        if empty is not None:
            heads = drawn.asked.kv_heads
            fail(
                "E473",
                f"tp rank {empty} of {degree} would hold nothing of `{name}`, whose dim {s.dim} is {s.shape[s.dim or 0]}",
                Label("<call>", where=f"tp = {degree}"),
                notes=(f"{s.origin}; {heads} key-value heads" if heads else s.origin,),
                remedy=f"choose a tp of at most {heads} for this model" if 0 < heads < degree else "",
            )


def _check_this_model(base: Base, network: Network) -> None:
    """The config is of the model that is converted. Raises: UcplError E472."""
    sizes = _sizes_of(base.model)
    _check_these_names(base.model, network)
    for name, shape in sizes.items():
        stated = network.shapes.get(network.owner(name))
        kind = network.root.class_name
        if stated is None:
            near = f"; it has `{next(iter(network.shapes))}`" if network.shapes else ""
            fail(
                "E472",
                f"the model has `{name}`, and {kind}, which the config names, has no such tensor{near}",
                Label("config.json", where="architectures"),
                remedy='say the class that was trained: "architectures": ["LlamaForCausalLM"], of a config of the same sizes',
            )
        if shape is not None and shape != stated:
            fail(
                "E472",
                f"`{name}` is {list(shape)}, and {list(stated)} in {kind} as the config has it",
                Label("config.json"),
                remedy="give the config.json of this very model",
            )


def _check_these_names(model: nodes.Model, network: Network) -> None:
    """Check that the model has all names and tensors of the class.

    If the class has two tensors, the model must have two: DeepSpeed requests all names of a module.
    """
    tensors = {item.path for item in model.items if isinstance(item, nodes.Tensor)}
    here = tensors | {item.path for item in model.items if isinstance(item, nodes.Alias)}
    kind = network.root.class_name
    for name in network.shapes:
        others = (alias for alias, owner in network.owners.items() if owner == name)
        if name not in here and not any(alias in here for alias in others):
            fail(
                "E472",
                f"{kind}, which the config names, has `{name}`, and the model has no such tensor",
                Label("config.json", where="architectures"),
                remedy="give the config.json of this very model",
            )
    for alias, owner in network.owners.items():
        if alias in tensors and owner in tensors:
            fail(
                "E472",
                f"`{alias}` and `{owner}` are two tensors of the model, and one in {kind} as the config has it",
                Label("config.json", where="tie_word_embeddings"),
                remedy="give the config.json of this very model: with tie_word_embeddings false, where they are two",
            )


def _sizes_of(model: nodes.Model) -> Mapping[str, tuple[int, ...] | None]:
    """Shapes of parameters, where they are numbers."""
    out: dict[str, tuple[int, ...] | None] = {}
    for item in model.items:
        if isinstance(item, nodes.Tensor) and item.kind != "buffer" and item.scaling is None:
            sizes = tuple(d.size for d in item.dims)
            known = tuple(n for n in sizes if n is not None)
            out[item.path] = known if len(known) == len(sizes) else None
    return out
