"""Placement of every element of every logical tensor; `locate` computes it."""

from ucpl.placement.homes import Home, Homes
from ucpl.placement.locate import locate
from ucpl.placement.placement import Part, Pieces, Placement, element_name

__all__ = ["Home", "Homes", "Part", "Pieces", "Placement", "element_name", "locate"]
