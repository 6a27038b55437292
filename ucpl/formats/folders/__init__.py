"""Folders of training frameworks around a checkpoint of shards.

The framework adds its own files. A kind of folder is data (`kinds`).
"""
