"""Graph mode: the graphs that torch.compile captures, each computed by one plan of calls."""
