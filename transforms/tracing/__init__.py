"""What is proven about the forward code of a model."""
