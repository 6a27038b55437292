"""ucpl, the universal checkpoint language."""
