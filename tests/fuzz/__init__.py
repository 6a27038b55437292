"""Inputs that are damaged with their structure in mind.

Every reader refuses them by name, or reads them.

`python -m tests.fuzz --inputs 500000 --reader NAME --seed N` runs one reader for long; the default suite runs a small share.
A reader is a record of `tests/fuzz/reader.py` in the tuple of `tests/fuzz/readers.py`.
"""
