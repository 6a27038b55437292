"""Folders of training frameworks around a checkpoint of shards.

The framework adds its own files. A kind of folder is data in a module (`trainer`): names that identify it, and a table
of patterns with fates.
"""

from ucpl.formats.folders.fates import PlacedFile, Sorted, sorted_into, with_beside
from ucpl.formats.folders.reading import container_of

__all__ = ["PlacedFile", "Sorted", "container_of", "sorted_into", "with_beside"]
