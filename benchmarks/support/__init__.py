"""Modules that the programs in benchmarks/ import as `support`, or start in processes of their own."""
