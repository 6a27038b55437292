"""Files: the places of stored tensors, and the values next to them.

Stores map (file, key) to extents; they never cut or join.
"""
