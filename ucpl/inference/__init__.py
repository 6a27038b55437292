"""Frontends: texts made from what is found, a checkpoint in the wild or a model of another library."""
