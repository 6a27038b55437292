"""Files: where stored tensors lie, and what stands beside them. Stores map (file, key) to extents; they never cut or join."""
