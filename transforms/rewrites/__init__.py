"""What passes leave in a model: exchanged tensors and classes, and the way back."""
