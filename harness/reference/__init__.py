"""Readable implementations in torch: the oracle, two verifies, two folds, and one inverse per file."""
