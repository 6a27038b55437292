"""A config.json's transformers class, its logits, and unused parameters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ucpl.digests import crc32
from ucpl.verification.train_states import counted_names

__all__ = ["Forward", "HuggingFaceClass", "Logits"]

Logits = NDArray[np.floating]
Forward = Callable[[Path], Logits]  # a Hugging Face folder -> logits
_Torch: TypeAlias = Any  # a model or a tensor: torch is loaded when a class is asked
_STACKED = 3  # dims of a parameter that holds experts one behind the other


class HuggingFaceClass:
    """In fp32 on the processor, from the files of this machine alone."""

    @staticmethod
    def is_installed() -> bool:
        try:
            return bool(find_spec("torch") and find_spec("transformers"))
        except (ImportError, ValueError):
            return False

    def __call__(self, folder: Path) -> Logits:
        torch = import_module("torch")

        model = _loaded(folder)
        with torch.no_grad():
            logits: Logits = _logits(model).numpy()
        return logits

    def silent(self, folder: Path) -> tuple[str, ...]:
        """Mistakes that equal logits do not show.

        In parameters that they do not depend on, and in equal parameters.
        """
        model = _loaded(folder)
        out = []
        if equal := _equal(model):
            out.append(f"equal parameters could be swapped: {counted_names(equal)}")
        try:
            idle = _idle(model)
        except Exception as error:  # an operation of the class that has no gradient: it raises whatever it likes
            text = f"{type(error).__name__}: {str(error)[:200]}"
            out.append(f"the class has no gradients, so that the effect of each parameter is unknown: {text}")
        else:
            out += [f"no logit depends on {counted_names(idle)}"] if idle else []
        return tuple(out)


def _offline() -> AbstractContextManager[None]:
    from ucpl.inference.hf.offline import offline  # loaded where a class is asked, and nowhere else

    return offline()


def _loaded(folder: Path) -> _Torch:
    torch = import_module("torch")

    with _offline():
        transformers = import_module("transformers")
        named = json.loads((folder / "config.json").read_text()).get("architectures") or [""]
        kind = getattr(transformers, str(named[0]), transformers.AutoModelForCausalLM)
        is_model = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)
        load = (kind if is_model else transformers.AutoModelForCausalLM).from_pretrained
        model = load(str(folder), dtype=torch.float32, trust_remote_code=False, local_files_only=True)
    return model.eval()


def _logits(model: _Torch) -> _Torch:
    torch = import_module("torch")

    vocabulary = int(model.config.vocab_size)
    ids = torch.tensor([[(7 * i * i + 3 * i + 1) % vocabulary for i in range(min(16, vocabulary))]])
    decoded = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    with _offline():
        logits = model(ids, **decoded).logits
    return logits


def _equal(model: _Torch) -> list[str]:
    """Parameters with the elements of another one of the same shape."""
    alike: dict[object, list[str]] = {}
    for name, parameter in model.named_parameters():
        bits = np.ascontiguousarray(parameter.detach().numpy()).reshape(-1).view(np.uint8)
        alike.setdefault((tuple(parameter.shape), crc32(bits.data)), []).append(name)
    return [name for names in alike.values() if len(names) > 1 for name in names]


def _idle(model: _Torch) -> list[str]:
    """Parameters, or experts of a stacked one, whose gradient is zero.

    No small change of them changes a logit.
    """
    torch = import_module("torch")

    active: dict[str, _Torch] = {}

    def noted(name: str) -> Callable[[_Torch], None]:
        def note(parameter: _Torch) -> None:
            if parameter.grad is not None:
                rows = parameter.grad.reshape(len(parameter), -1) if parameter.ndim else parameter.grad.reshape(1, 1)
                active[name] = (rows != 0).any(dim=1)
                parameter.grad = None  # all gradients at once would take as much memory as the model

        return note

    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if parameter.is_floating_point():
            parameter.requires_grad_(True).register_post_accumulate_grad_hook(noted(name))
    logits = _logits(model)
    weights = torch.linspace(-1, 1, logits.numel()).sin().reshape(logits.shape)
    finite = logits.isfinite()
    (logits[finite] * weights[finite]).sum().backward()
    return [text for name, p in parameters.items() for text in _idle_text(name, p, active.get(name))]


def _idle_text(name: str, parameter: _Torch, rows: _Torch | None) -> Iterator[str]:
    if rows is None or not rows.any():
        yield name
    elif parameter.ndim >= _STACKED:
        yield from (f"{name}[{n}]" for n in (~rows).nonzero().flatten().tolist())
