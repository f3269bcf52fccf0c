"""Benchmarks of fusedoptim against torch: docs/benchmarks.md has results and how to run them."""
