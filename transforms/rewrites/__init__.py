"""What passes leave in a model: replaced tensors and classes, and how to undo that."""
