"""Tensor names that the loader of a Hugging Face target needs.

The prefix of a wrapper is removed if all names have it, and config.json's class has the names without it. Without
transformers, only prefixes that wrappers are known to add are removed. The plan reports removed prefixes. An adapter of PEFT
gets the names that PEFT saves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attrs import evolve

from ucpl.conversion.requests import Called
from ucpl.errors import Label, fail
from ucpl.formats.peft_names import KINDS, MAGNITUDE
from ucpl.records import frozen
from ucpl.registry import format_named

if TYPE_CHECKING:
    from ucpl.conversion.requests import Given
    from ucpl.conversion.side import Side
    from ucpl.inference.parallel import Note

__all__ = ["for_loader"]

# Prefixes of all tensor names, by wrapper: DDP, torch.compile, FSDP, Fabric, and dicts of state dicts.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_forward_module.", "model_state.model.", "state_dict.")
PEFT = "base_model.model."
ADAPTER, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS = "diffusion_pytorch_model.safetensors"
# In a run, an adapter's name is behind the kind: lora_A.default.weight. PEFT saves lora_A.weight.
_OF_ADAPTER = rf"\.(?:{KINDS}|modules_to_save)\.(?!(?:weight|bias)\Z)(?P<adapter>[^.]+)(?=\.|\Z)"
_SAVED = rf"\.(?:{KINDS})(?:\.(?:weight|bias))?\Z"
_OF_BASE = r"\.(?:base_layer|original_module)(?=\.|\Z)"
_UNSPELLED = frozenset('*{}"\\')  # characters with a meaning of their own in a quoted name


@frozen
class _Names:
    """Names in each file by tensor. why: for the plan."""

    files: dict[str, dict[str, str]]  # file -> tensor -> its name there
    why: str


def for_loader(one: Called, source: Side, given: Given) -> tuple[Called, tuple[Note, ...]]:
    """The target's layout; with names by tensor if its loader needs others.

    Raises: UcplError E394.
    """
    from ucpl.language import nodes

    if not one.is_of_any or given.model is None or source.checkpoint is None:
        return one, ()
    names = [item.path for item in given.model.items if isinstance(item, nodes.Tensor)]
    lead = _lead(names, source, given)
    found = _of_peft(names, lead, source, given) or _of_diffusers(names, lead, source, given)
    if found is None and lead:
        found = _Names({"model.safetensors": {n: n.removeprefix(lead) for n in names}}, f"without `{lead}`")
    if found is None or any(_UNSPELLED & {*name} for name in names):
        return one, ()
    return _called(one, found), (("names", found.why, "as the loader of the target looks for them"),)


def _lead(names: Sequence[str], source: Side, given: Given) -> str:
    """The prefix of all names that the model's own names lack."""
    lead = ""
    while names and (word := next((w for w in WRAPPERS if all(n.startswith(lead + w) for n in names)), "")):
        lead += word
    if not lead or given.config is None:
        return lead
    from ucpl.inference.hf.classes import saved_of

    saved = saved_of(dict(given.config))
    if saved is None:
        return lead
    ends = [0, *(at + 1 for at, letter in enumerate(lead) if letter == ".")]
    return lead[: max(ends, key=lambda end: sum(n[end:] in saved.shapes for n in names))]


def _of_peft(names: Sequence[str], lead: str, source: Side, given: Given) -> _Names | None:
    """An adapter, and the base model's tensors if they are stored.

    None: the names are not PEFT's. Raises: UcplError E394.
    """
    search = re.compile(_OF_ADAPTER).search
    found = {name: search(name) for name in names}
    adapters = sorted({match["adapter"] for match in found.values() if match is not None})
    is_peft = all(name.startswith(lead + PEFT) for name in names)
    is_saved = _is_read_from(ADAPTER, source) or (
        is_peft and not adapters and any(map(re.compile(_SAVED).search, names))
    )
    if not is_saved and (not adapters or not is_peft):
        return None
    if not is_saved and len(adapters) > 1:
        fail(
            "E394",
            f"the model has {len(adapters)} adapters, {', '.join(adapters[:4])}, and a folder of PEFT has one",
            Label(str(source.checkpoint and source.checkpoint.top)),
            remedy="--drop '*.NAME.*' leaves out an adapter by its name",
        )
    if not _has_config(source, given):
        fail(
            "E394",
            f"PEFT needs {CONFIG}, and {source.checkpoint and source.checkpoint.top} has none",
            Label(str(source.checkpoint and source.checkpoint.top)),
            remedy=f"write --config PATH/{CONFIG}: PEFT saves it with an adapter",
        )
    if is_saved:
        return _Names({ADAPTER: {n: n.removeprefix(lead) for n in names}}, f"those of the adapter, in {ADAPTER}")
    (adapter,) = adapters
    left_out = re.compile(rf"(\.modules_to_save)?\.{re.escape(adapter)}(?=\.|\Z)")
    own = {
        n: MAGNITUDE.sub(r"\1", left_out.sub("", n.removeprefix(lead)))
        for n, match in found.items()
        if match is not None
    }
    base = {n: re.sub(_OF_BASE, "", n.removeprefix(lead + PEFT)) for n, match in found.items() if match is None}
    files: dict[str, dict[str, str]] = {ADAPTER: own}
    if base:
        files["model.safetensors"] = base
    text = f"the adapter `{adapter}` in {ADAPTER}" + (", the base model in model.safetensors" if base else "")
    return _Names(files, text)


def _of_diffusers(names: Sequence[str], lead: str, source: Side, given: Given) -> _Names | None:
    """The tensors in the file that diffusers looks for.

    None: config.json is not of diffusers.
    """
    from ucpl.files.model_texts import config_of

    assert source.checkpoint is not None
    config = given.config if given.config_file is not None else config_of(source.checkpoint)
    if config is None or "_diffusers_version" not in config:
        return None
    return _Names({DIFFUSERS: {n: n.removeprefix(lead) for n in names}}, f"the same, in {DIFFUSERS}")


def _is_read_from(file: str, source: Side) -> bool:
    """True if the source is a Hugging Face folder with this file."""
    checkpoint = source.checkpoint
    return checkpoint is not None and format_named(checkpoint.format).has_model_files and file in checkpoint.files


def _has_config(source: Side, given: Given) -> bool:
    from ucpl.files.model_texts import carried_files

    checkpoint = source.checkpoint
    assert checkpoint is not None
    beside = checkpoint.container.files if checkpoint.container is not None else ()
    is_given = given.config_file is not None and given.config_file.name == CONFIG
    return is_given or CONFIG in carried_files(checkpoint) or any(Path(f.name).name == CONFIG for f in beside)


def _called(one: Called, found: _Names) -> Called:
    """The shipped layout, with these files and names."""
    from ucpl.language.words import quote
    from ucpl.layout import load

    labels = {file: "weights" if n == 0 else f"more{n}" for n, file in enumerate(found.files)}
    lines = ["ucpl 2", 'layout named(shard = "5GB", dtype = "") of any {']
    lines += ["  framework huggingface(shard = shard, dtype = dtype)"]
    lines += [f"  file {label} = safetensors {quote(file)}" for file, label in labels.items()]
    lines += ["  group * = model"]
    for file, members in found.files.items():
        lines += [f"  {quote(name)} = ... in {labels[file]} as {quote(key)}" for name, key in _apart(members).items()]
    lines += ["  * is alias = none", "  state * for * = none", "  derive fp32 from weight", "}", ""]
    return Called(load(("named.ucpl", "\n".join(lines))), evolve(one.call, name="named"))


def _apart(members: Mapping[str, str]) -> Mapping[str, str]:
    """Raises: UcplError E394 if two tensors would have one name."""
    seen: dict[str, str] = {}
    for name, key in members.items():
        if (other := seen.setdefault(key, name)) != name:
            fail("E394", f"`{other}` and `{name}` would both be `{key}`", Label("<target>", where=key))
    return members
