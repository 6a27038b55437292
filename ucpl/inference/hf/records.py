"""Facts of a model before its text is written."""

from __future__ import annotations

import re

from attrs import field

from ucpl.inference.hf.splits import OutputSplit
from ucpl.records import frozen
from ucpl.texts import Json

__all__ = ["MTP", "Behind", "Config", "ModelFacts", "FoundTensor", "Vector", "Version", "agrees", "identifier", "moves"]

Config = dict[str, Json]
MTP = "num_nextn_predict_layers"
Vector = tuple[int, ...]  # one size in each version; 0: the version lacks the tensor


@frozen
class FoundTensor:
    """One stored tensor, as a header or a class has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool = False


@frozen
class Version:
    """The tensors of the class for one config.

    The first version is the config's own; others have other numbers in it.
    numbers: by the path of a key ("text_config.hidden_size"), whole numbers. lists: by the paths of their keys, lists
    that say something of each layer, or name some.
    """

    tensors: tuple[FoundTensor, ...]
    numbers: dict[str, int] = field(factory=dict)
    lists: dict[str, list[Json]] = field(factory=dict)
    items: dict[str, list[int]] = field(factory=dict)  # other lists of whole numbers: widths of convolutions
    changed: str = ""  # the one key that differs from the version before the first such; "" where several do


@frozen
class Behind:
    """Layers behind the last.

    layers: the class's count. count: the layers behind them. is_stored: the files have them.
    """

    layers: int
    count: int
    is_stored: bool = False
    container: str = "model.layers"

    @property
    def value(self) -> str:
        return f"config.{MTP}" if self.is_stored else "0"

    @property
    def note(self) -> str:
        many = (
            f"{self.count} layer{'s' if self.count > 1 else ''} behind the last (multi-token prediction, config.{MTP})"
        )
        if self.is_stored:
            return f"The files have {many}, which the class drops on loading: mtp."
        return f"The class drops {many}. Files that have them are described with -D mtp={self.count}."


@frozen
class ModelFacts:
    """All facts of a model before its text is written.

    variations: of the class, besides `tensors`; empty without a class.
    absent: keys that the class has and the config lacks, each with its default.
    """

    tensors: tuple[FoundTensor, ...]
    config: Config
    numbers: dict[str, int] = field(factory=dict)
    lists: dict[str, list[Json]] = field(factory=dict)
    variations: tuple[Version, ...] = ()
    absent: dict[str, int] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)
    cuts: dict[str, str] = field(factory=dict)  # module pattern (model.layers.*.mlp.up_proj) -> colwise, rowwise, ...
    notes: tuple[str, ...] = ()
    origin: str = "headers of its files"
    behind: Behind | None = None
    splits: dict[str, OutputSplit] = field(factory=dict)  # of fused tensors, by the name with * for numbers
    items: dict[str, list[int]] = field(factory=dict)


def agrees(seen: Vector, made: Vector) -> bool:
    """True if a size follows in every version that has the tensor."""
    return all(v in (0, m) for v, m in zip(seen, made, strict=True))


def moves(vector: Vector) -> bool:
    """True if a size differs between versions."""
    return len({*vector} - {0}) > 1


def identifier(text: str) -> str:
    """A name of the language that is like a text."""
    made = re.sub(r"\W", "_", text, flags=re.ASCII)
    return made if made and not made[0].isdigit() else f"_{made}"
