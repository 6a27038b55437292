"""Regions: where every element of every logical tensor lies. `locate` is the verb of this room."""

from ucpl.regions.homes import Home, Homes
from ucpl.regions.locate import locate
from ucpl.regions.placement import POLICIES, Part, Pieces, Placement, element_name

__all__ = ["POLICIES", "Home", "Homes", "Part", "Pieces", "Placement", "element_name", "locate"]
