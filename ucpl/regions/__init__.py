"""Regions: where every element of every logical tensor lies. `locate` is the verb of this room."""

from ucpl.regions.homes import Home, Homes
from ucpl.regions.locate import locate
from ucpl.regions.placement import Part, Pieces, Placement, element_name

__all__ = ["Home", "Homes", "Part", "Pieces", "Placement", "element_name", "locate"]
