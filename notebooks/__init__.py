"""The notebooks, and the commands that keep and run them: ``python -m notebooks``."""
