"""Timings of fusedoptim against torch: a module for each optimizer, and what they share."""
