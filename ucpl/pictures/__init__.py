"""Pictures of layouts, plans and checkpoints as single files.

They need neither a network nor torch.
"""
