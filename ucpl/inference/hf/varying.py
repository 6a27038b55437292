"""A config with other numbers, so that equal sizes become different.

Divisibility is kept: heads by their groups, the width by heads. Numbers that are no sizes (tokens, periods,
positions in lists) stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy
from itertools import islice
from math import ceil, lcm

from ucpl.inference.hf.records import Config
from ucpl.records import frozen
from ucpl.texts import Json

__all__ = [
    "COUNTED",
    "COUNTS",
    "EXPERTS",
    "HEADS",
    "WIDTH",
    "Other",
    "few_experts",
    "items_of",
    "lists_of",
    "numbers_of",
    "singles",
    "varied",
]

HEADS = re.compile(r"^(num_(attention_)?heads|n_heads?|(encoder|decoder)_attention_heads|mamba_n(um)?_heads)$")
WIDTH = re.compile(r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|dec_hidden_size)$")
COUNTS = re.compile(
    r"^(num_(hidden_|decoder_|encoder_)?layers|n_layers?|(encoder|decoder)_layers|depth|num_nextn_predict_layers"
    r"|first_k_dense_replace|num_dense_layers|moe_layer_start_index)$"
)
_LAYERS = re.compile(r"layer|block")
_SSM_GROUPS = re.compile(r"^(mamba_n_groups|mamba_ngroups|n_groups)$")
_GROUPS = re.compile(rf"^(num_key_value_heads|num_kv_heads|n_kv_heads|multi_query_group_num)$|{_SSM_GROUPS.pattern}")
EXPERTS = re.compile(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts)$")
COUNTED = re.compile(f"{COUNTS.pattern}|{EXPERTS.pattern}")  # keys that make a class create many objects
_SIZES = re.compile(
    r"size|dim|embd|inner|rank|width|channel|d_model|d_ff|d_kv|d_state|d_conv|d_head|kernel|state|bins|position|buckets"
)
_NO_SIZES = re.compile(r"token|_id$|_idx$|index|image_size|block_size|chunk|patch|vision_feature|top_?k|per_tok|window")
_NAMES = re.compile(
    r"token|_id$|_ids$|_idx$|seed|beams|indices|per_tok|top_?k|^linear_num_"
)  # no sizes, or only two together
_EXPERTS_MAX = 16
_DEPTH_MAX = 8  # of configs inside a config
_COUNT_MAX = 400  # layers: a class of more is built again with as many


@frozen
class Other:
    """Variations besides sizes: the number of layers, and the kind of each."""

    counts: bool
    kinds: bool


def numbers_of(config: Config, prefix: str = "") -> dict[str, int]:
    """A config's positive integers whose paths the language can name."""
    out: dict[str, int] = {}
    for key, value in config.items():
        if not (isinstance(key, str) and key.isascii() and key.isidentifier()):
            continue
        if isinstance(value, dict) and prefix.count(".") < _DEPTH_MAX:
            out |= numbers_of(value, f"{prefix}{key}.")
        elif isinstance(value, int) and not isinstance(value, bool) and (value > 0 or (not value and "offset" in key)):
            out[prefix + key] = value
    return out


def lists_of(config: Config, prefix: str = "") -> dict[str, list[Json]]:
    """Lists of a config on layers, by path.

    They have one item per layer, or the numbers of some.
    """
    out: dict[str, list[Json]] = {}
    for key, value in config.items():
        if not (isinstance(key, str) and key.isascii() and key.isidentifier()):
            continue
        if isinstance(value, dict) and prefix.count(".") < _DEPTH_MAX:
            out |= lists_of(value, f"{prefix}{key}.")
        elif isinstance(value, list) and _LAYERS.search(key) and all(isinstance(v, int | str) for v in value):
            out[prefix + key] = value
    return out


def varied(config: Config, absent: dict[str, int], seed: int, what: Other) -> Config:
    """The config with other sizes.

    absent: numbers that it leaves to the class.
    """
    levels: dict[str, dict[str, int]] = {}
    for path, value in (numbers_of(config) | absent).items():
        prefix, _, key = path.rpartition(".")
        levels.setdefault(prefix, {})[key] = value
    primes = islice(_primes(), seed, None)
    out = deepcopy(config)
    for prefix, level in levels.items():
        lists = _lengths(config, prefix)
        for key, value in _sizes(level, primes, seed).items():
            _set(out, prefix, key, value)
        if what.counts:
            for key, value in _counts(level, lists, seed).items():
                _set(out, prefix, key, value)
    if what.kinds:
        for path, items in lists_of(config).items():
            prefix, _, key = path.rpartition(".")
            place = _at(out, prefix)
            place[key] = _turned(
                items, seed + 1, [n for k, n in place.items() if COUNTS.search(k) and isinstance(n, int)]
            )
    return out


def singles(config: Config, absent: dict[str, int]) -> Iterator[tuple[str, list[Config]]]:
    """Each number of a config, and configs that differ in it alone.

    A number is named by its path. The likelier valid configs come first. A class may reject some. A list of
    whole numbers counts as one number.
    """
    numbers = numbers_of(config) | absent
    for path, value in numbers.items():
        prefix, _, key = path.rpartition(".")
        lists = _lengths(config, prefix)
        if _NAMES.search(key) or (COUNTS.search(key) and (value in lists or value > _COUNT_MAX)):
            continue
        is_divided = WIDTH.search(key) or HEADS.search(key) or _GROUPS.search(key) or "image" in key
        tries = (2 * value, 3 * value, value + 1) if is_divided else (value + 1, 2 * value, value + 2, value - 1)
        yield path, [_changed(config, path, n) for n in dict.fromkeys(tries) if n > 0 or "offset" in key]
    for path, items in items_of(config).items():
        apart = [n + 1 + i for i, n in enumerate(items)]  # equal items become different
        yield (
            path,
            [_changed(config, path, list(new)) for new in (apart, [2 * n for n in items], [n + 1 for n in items])],
        )


def items_of(config: Config) -> dict[str, list[int]]:
    """Lists of sizes of a config, by path."""
    return dict(_lists(config))


def few_experts(config: Config) -> Config:
    """The config with few experts.

    Each of many experts would be a tensor in every layer.
    """
    out = deepcopy(config)
    for path, value in numbers_of(config).items():
        prefix, _, key = path.rpartition(".")
        if EXPERTS.search(key) and value > _EXPERTS_MAX:
            _set(out, prefix, key, _experts(numbers_of(_at(config, prefix)), 0))
    return out


def _lengths(config: Config, prefix: str) -> set[int]:
    """Lengths of lists with an item per layer."""
    level = _at(config, prefix)
    return {len(v) for k, v in level.items() if isinstance(v, list) and _LAYERS.search(k)}


def _changed(config: Config, path: str, value: Json) -> Config:
    out = deepcopy(config)
    prefix, _, key = path.rpartition(".")
    _set(out, prefix, key, value)
    return out


def _lists(config: Config, prefix: str = "") -> Iterator[tuple[str, list[int]]]:
    for key, value in config.items():
        if isinstance(value, dict) and prefix.count(".") < _DEPTH_MAX:
            yield from _lists(value, f"{prefix}{key}.")
        elif isinstance(value, list) and value and all(type(n) is int and n > 0 for n in value):
            if not (_LAYERS.search(key) or _NAMES.search(key)):
                yield prefix + key, [n for n in value if isinstance(n, int)]


def _turned(items: list[Json], by: int, counts: list[int]) -> list[Json]:
    """A list per layer, rotated; numbers of layers are shifted.

    Numbers shift further than items: two lists that agree for the config's own layers then differ.
    """
    numbers = [v for v in items if isinstance(v, int)]
    if len(numbers) < len(items) or len(set(numbers)) < len(items):
        return items[-by:] + items[:-by]
    layers = min((n for n in counts if n > max(numbers, default=0)), default=max(numbers, default=0) + by + 1)
    return [(n + by + 1) % layers for n in numbers]


def _sizes(level: dict[str, int], primes: Iterator[int], seed: int) -> dict[str, int]:
    """Other sizes for those of one config, above one where they were."""
    out: dict[str, int] = {}
    for key, value in level.items():
        # One group of keys and values may be another kind of attention; one of a state-space layer is a number like others.
        if _GROUPS.search(key) and (value > 1 or _SSM_GROUPS.search(key)):
            out[key] = next(primes)
    groups = lcm(*out.values())
    for key in level:
        if HEADS.search(key):
            out[key] = groups * next(primes)
    keys = level.get("linear_num_key_heads")
    if keys:
        out["linear_num_key_heads"] = next(primes)
        out["linear_num_value_heads"] = out["linear_num_key_heads"] * next(primes)
    heads = lcm(*(v for k, v in out.items() if HEADS.search(k)))
    for key, value in level.items():
        if key in out or COUNTS.search(key) or _NO_SIZES.search(key) or value < 2:
            continue
        if WIDTH.search(key):
            out[key] = 8 * heads * next(primes)
        elif EXPERTS.search(key):
            out[key] = _experts(level, seed)
        elif key in ("expand", "mamba_expand"):
            out[key] = value + 1 + seed
        elif _SIZES.search(key):
            out[key] = value + 8 * next(primes)
    return out | _expanded(level, out)


def _experts(level: dict[str, int], seed: int) -> int:
    """A small number of experts that the router accepts."""
    groups = level.get("n_group", 1)
    least = max(level.get("num_experts_per_tok", 1), level.get("moe_topk", 1))
    return groups * (ceil(least / groups) + 1 + seed)


def _expanded(level: dict[str, int], out: dict[str, int]) -> dict[str, int]:
    """Heads of a state-space layer, with the product at the expanded width."""
    for prefix, heads, width in (("mamba_", "mamba_n_heads", "mamba_d_head"), ("", "num_heads", "head_dim")):
        expand, hidden = level.get(f"{prefix}expand", 1), level.get("hidden_size", 0)
        if expand > 1 and heads in level and level[heads] * level.get(width, 0) == expand * hidden:
            return {width: out[f"{prefix}expand"] * out["hidden_size"] // out[heads]}
    return {}


def _counts(level: dict[str, int], lists: set[int], seed: int) -> dict[str, int]:
    """Other numbers of layers, if no list has one item per layer."""
    found = [key for key, value in level.items() if COUNTS.search(key) and value not in lists]
    return {key: level[key] + (i + 1) * (seed + 1) for i, key in enumerate(found) if level[key] < _COUNT_MAX}


def _at(config: Config, prefix: str) -> Config:
    value: Json = config
    for part in prefix.split(".") if prefix else ():
        value = value.get(part, {}) if isinstance(value, dict) else {}
    return value if isinstance(value, dict) else {}


def _set(config: Config, prefix: str, key: str, value: Json) -> None:
    level = config
    for part in prefix.split(".") if prefix else ():
        inner = level.setdefault(part, {})
        if not isinstance(inner, dict):
            return
        level = inner
    level[key] = value


def _primes() -> Iterator[int]:
    found: list[int] = []
    n = 2
    while True:
        n += 1
        if all(n % p for p in found):
            found.append(n)
            if n > 3:
                yield n
