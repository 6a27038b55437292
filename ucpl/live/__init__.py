"""Tensors of a running job, and the ranks that hold them: the entrance of the first, and the agreement of the second."""
