"""Builds the API reference, docs/reference/, from the docstrings, which must be complete.

``python -m tools.reference build|check``. griffe reads the sources without running them:
docs/design/reference.md says why.
"""
