"""Random walks over topologies: a checkpoint is converted again and again, and stays the same training state bit for bit."""
