"""Pictures of layouts, plans and checkpoints: each one file that needs no network, to be looked at. Torch is not needed."""
