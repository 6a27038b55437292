"""The ledger: digests of all that ucpl writes and prints, by which a redesign shows that it changes nothing."""
