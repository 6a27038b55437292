"""The class of a config on the meta device, as records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Protocol, cast

from ucpl.inference.hf.classes import built_of
from ucpl.inference.hf.modules import EMBEDDING, LINEAR, LIST, NORM, Heads, Module, Network, Shape
from ucpl.inference.hf.records import Config

__all__ = ["network_of"]

# Keys of a config in the order in which DeepSpeed 0.19.8 looks for them (module_inject/tp_shard.py).
KV_KEYS: tuple[str, ...] = ("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads")
KV_KEYS += ("num_attention_heads", "n_heads", "attention_heads")
_QUERY_KEYS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_HIDDEN_KEYS = ("n_embd", "hidden_size")
_SCALED = "transformers.models.gemma3.modeling_gemma3.Gemma3TextScaledWordEmbedding"  # its rows are scaled alike


class _Parameter(Protocol):
    @property
    def shape(self) -> Iterable[int]: ...


class _Torch(Protocol):
    """As much of a torch module as is asked."""

    _parameters: Mapping[str, _Parameter | None]
    _modules: Mapping[str, _Torch | None]

    def named_parameters(self, remove_duplicate: bool = True) -> Iterable[tuple[str, _Parameter]]: ...


def network_of(config: Config) -> Network:
    """The model of a config.json.

    Raises: UcplError E396 if transformers is not installed, or cannot make it.
    """
    made, of = built_of(config)
    tie = getattr(made, "tie_weights", None)
    if callable(tie):  # which is done where weights are drawn, and none are
        tie()
    model = cast("_Torch", made)
    firsts = {id(parameter): name for name, parameter in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    plan, origins = _plan_of(made, of)
    return Network(
        _module("", model),
        {name: _shape(parameter) for name, parameter in model.named_parameters()},
        {name: firsts[id(parameter)] for name, parameter in every if name != firsts[id(parameter)]},
        plan,
        origins,
        _heads_of(of),
        _takes_loss(made),
        _inputs_of(made, model),
    )


def _shape(parameter: _Parameter) -> Shape:
    return tuple(parameter.shape)


def _module(name: str, module: _Torch) -> Module:
    nn = import_module("torch.nn")
    roles = ((nn.Linear, LINEAR), (nn.Embedding, EMBEDDING), (nn.LayerNorm, NORM), (nn.ModuleList, LIST))
    kind = type(module)
    return Module(
        name,
        f"{kind.__module__}.{kind.__qualname__}",
        next((role for of, role in roles if isinstance(module, of)), ""),
        {key: _shape(p) for key, p in module._parameters.items() if p is not None},
        tuple(_module(key, child) for key, child in module._modules.items() if child is not None),
        _is_plain(module),
    )


def _is_plain(embedding: object) -> bool:
    """Test whether an embedding only looks rows up."""
    nn = import_module("torch.nn")
    if not isinstance(embedding, nn.Embedding):
        return True
    kind = type(embedding)
    is_rows = kind.forward is nn.Embedding.forward or f"{kind.__module__}.{kind.__qualname__}" == _SCALED
    return bool(is_rows and embedding.max_norm is None and not embedding.scale_grad_by_freq and not embedding.sparse)


def _plan_of(model: object, config: object) -> tuple[dict[str, str], dict[str, str]]:
    """Patterns of the config, the class and the instance.

    `model.x` is left out if `x` is present.
    """
    kind = type(model).__name__
    told = (
        (getattr(config, "base_model_tp_plan", None), f"base_model_tp_plan of {type(config).__name__}"),
        (getattr(type(model), "_tp_plan", None), f"_tp_plan of {kind}"),
        (vars(model).get("_tp_plan"), f"_tp_plan of {kind}"),
    )
    plan: dict[str, str] = {}
    origins: dict[str, str] = {}
    for patterns, origin in told:
        for pattern, style in (patterns if isinstance(patterns, dict) else {}).items():
            short = str(pattern).removeprefix("model.")
            if short != pattern and any(known.removeprefix("model.") == short for known in plan):
                continue
            plan[str(pattern)] = str(style)
            origins.setdefault(str(pattern), origin)
    return plan, origins


def _heads_of(config: object) -> Heads:
    inner = getattr(config, "text_config", None)
    said = config if inner is None else inner
    kind = type(said).__name__

    def first(keys: Iterable[str]) -> tuple[int, str]:
        for key in keys:
            value = getattr(said, key, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value, f"{key} of {kind}"
        return 0, ""

    return Heads(*first(KV_KEYS), first(_QUERY_KEYS)[0], first(_HIDDEN_KEYS)[0])


def _takes_loss(model: object) -> bool:
    """Test whether another loss can be set.

    DeepSpeed sets its own if logits are parts of the vocabulary.
    """
    other = object()
    try:
        before = model.loss_function  # type: ignore[attr-defined]
        model.loss_function = other  # type: ignore[attr-defined]
        taken = model.loss_function is other  # type: ignore[attr-defined]
        model.loss_function = before  # type: ignore[attr-defined]
    except (AttributeError, TypeError):
        return False
    return taken


def _inputs_of(model: object, root: _Torch) -> str:
    """The path of the module of input embeddings, or ""."""
    ask = getattr(model, "get_input_embeddings", None)
    try:
        found = ask() if callable(ask) else None
    except (AttributeError, NotImplementedError):
        return ""
    named = getattr(root, "named_modules", None)
    return next((name for name, m in named() if m is found), "") if callable(named) and found is not None else ""
