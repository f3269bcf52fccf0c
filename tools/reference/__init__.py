"""The API reference, docs/reference/: built from the docstrings, which must be complete.

griffe reads the sources without running them, so that no driver, torch or numpy is needed and the
pages are the same wherever they are built. ``python -m tools.reference build|check``.
"""
