"""Graph mode: what torch.compile captures of a model, computed by one plan of calls."""
