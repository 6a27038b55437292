"""Mutants: faults planted in a copy of the product, with tests."""
