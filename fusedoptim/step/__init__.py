"""One optimizer step: a transaction over rows of parameters, gradients and state."""
