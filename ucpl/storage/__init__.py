"""Checkpoints in object stores, read and written like local files.

A URL becomes a folder of sparse files: empty files with the right names and sizes in a temporary folder. Code that
lists folders, queries sizes or opens files needs no change. Code that reads bytes calls `reading`, which fetches them
if the file is a sparse one. A target is written into a local folder and uploaded file by file (`uploads`). For local
paths only `reading`, `names` and `urls` are imported.
"""
