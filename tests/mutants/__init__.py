"""Mutants: faults that are planted in a copy of the product, each with the test that must go red."""
