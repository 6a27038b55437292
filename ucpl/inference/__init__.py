"""Layouts and models from a checkpoint or from another library."""
