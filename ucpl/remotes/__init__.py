"""Checkpoints in object stores, behind the calls that read and write local files.

A URL becomes a *shadow*: a tree of empty files of the right names and sizes in a temporary folder. Whoever lists, asks for
sizes or opens needs no change; what reads bytes asks `reading`, which fetches them where a file is a shadow. A target grows
in a local folder and goes up file by file (`uploads`). Nothing here but `reading`, `names` and `urls` is imported for local
paths.
"""
