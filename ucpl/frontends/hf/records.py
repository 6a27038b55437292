"""What is known of a model before its text is written."""

from __future__ import annotations

from attrs import field, frozen

from ucpl.texts import Json

__all__ = ["Config", "Facts", "Found", "Vector", "Version"]

Config = dict[str, Json]
Vector = tuple[int, ...]  # one size, in each version


@frozen
class Found:
    """One stored tensor, as a header or a class has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    is_buffer: bool = False


@frozen
class Version:
    """What the class saves for one config. The first version is the config's own; others have other numbers in it.

    numbers: by the path of a key ("text_config.hidden_size"), whole numbers. lists: by the paths of their keys, lists
    that say something of each layer, or name some.
    """

    tensors: tuple[Found, ...]
    numbers: dict[str, int] = field(factory=dict)
    lists: dict[str, list[Json]] = field(factory=dict)


@frozen
class Facts:
    """All that is known of a model before its text is written.

    variations: of the class, beside `tensors`; none where there is no class.
    absent: keys that the class has and the config lacks, each with what stands for it: its default.
    """

    tensors: tuple[Found, ...]
    config: Config
    numbers: dict[str, int] = field(factory=dict)
    lists: dict[str, list[Json]] = field(factory=dict)
    variations: tuple[Version, ...] = ()
    absent: dict[str, int] = field(factory=dict)
    aliases: dict[str, str] = field(factory=dict)
    cuts: dict[str, str] = field(factory=dict)  # module pattern (model.layers.*.mlp.up_proj) -> colwise, rowwise, ...
    notes: tuple[str, ...] = ()
    origin: str = "headers of its files"
