"""Folders in which a checkpoint of shards is only a part: a training framework puts its own files beside them.

A kind of folder is data, a module each (`trainer`): names by which it is told, and a table of patterns with fates.
"""

from ucpl.formats.folders.fates import Placed, Sorted, sorted_into, with_beside
from ucpl.formats.folders.reading import container_of

__all__ = ["Placed", "Sorted", "container_of", "sorted_into", "with_beside"]
