"""Tensors of a running job, and the agreement of its ranks."""
