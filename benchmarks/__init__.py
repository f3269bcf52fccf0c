"""Timings of fusedoptim's optimizers against torch's, one module for each optimizer."""
