"""Random walks over topologies.

A checkpoint is converted again and again, and stays the same training state bit for bit.
"""
