"""Benchmarks of fusedoptim against torch: docs/benchmarks/ has results and how to run them."""
