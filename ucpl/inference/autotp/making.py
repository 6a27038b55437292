"""A target's cuts at a tensor-parallel degree, from its config's class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.errors import Label, UcplError, fail
from ucpl.extents import Sharding
from ucpl.inference.autotp.drawn import AutoTPOptions, Drawn
from ucpl.inference.autotp.plans import by_plan
from ucpl.inference.autotp.policies import by_policies
from ucpl.inference.autotp.vocabulary import head_of
from ucpl.inference.hf.ties import with_ties
from ucpl.inference.parallel import GRAIN, KV_HEADS, Base, Cuts, Note, origins
from ucpl.language import nodes
from ucpl.layout.scope import Config, Scope
from ucpl.placement.sharding import TP

if TYPE_CHECKING:
    from ucpl.inference.hf.modules import Network

__all__ = ["cuts_of", "dealt"]

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
