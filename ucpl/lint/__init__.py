"""Lint: remarks on the text of specs, before any checkpoint is opened.

`conversion.checking` calls the rules; `lint.rules` has their ids.
"""
