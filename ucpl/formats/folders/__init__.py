"""Folders of training frameworks around a checkpoint of shards.

The framework adds its own files. A kind of folder is data (`kinds`).
"""

from ucpl.formats.folders.fates import PlacedFile, Sorted, sorted_into, with_companions
from ucpl.formats.folders.reading import container_of

__all__ = ["PlacedFile", "Sorted", "container_of", "sorted_into", "with_companions"]
