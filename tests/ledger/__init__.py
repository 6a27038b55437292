"""The ledger: digests of all outputs of ucpl.

A redesign shows with it that it changes nothing.
"""
