"""Lint: remarks on the text of specs, before any checkpoint is opened."""
