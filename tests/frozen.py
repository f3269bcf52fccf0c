"""Exclude what is imported before this module from garbage collection.

A fork would otherwise visit, and so copy, all objects of torch in each collection.
"""

from __future__ import annotations

from tests.garbage import freeze

freeze()
