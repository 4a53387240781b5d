"""Benchmarks: everything side by side in one run in the same lab. How to add one: harness.py."""
