"""Notebooks, and the commands that execute and strip them: ``python -m notebooks``."""
