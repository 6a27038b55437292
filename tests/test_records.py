"""Records show themselves as attrs would show them."""

from __future__ import annotations

import attrs
import pytest
from attrs import field

from ucpl.records import define, frozen


def test_a_record_shows_its_fields_as_attrs_does() -> None:
    @frozen
    class Place:
        file: str
        row: int = 0
        whole: str = field(default="long", repr=False)

    @define(eq=False, slots=False)
    class Counter:
        places: tuple[Place, ...] = ()

    counter = Counter((Place("a.pt", 3),))
    place = "test_a_record_shows_its_fields_as_attrs_does.<locals>.Place(file='a.pt', row=3)"
    assert repr(counter.places[0]) == place
    assert repr(counter) == f"test_a_record_shows_its_fields_as_attrs_does.<locals>.Counter(places=({place},))"
    assert attrs.has(Place)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        counter.places[0].row = 4  # type: ignore[misc]


def test_the_own_text_of_a_class_stays() -> None:
    @frozen
    class Named:
        name: str

        def __repr__(self) -> str:
            return self.name

    @frozen
    class Below(Named):
        row: int

    assert repr(Named("w")) == "w"
    assert repr(Below("w", 2)).endswith("Below(name='w', row=2)")  # as attrs: each class its own
