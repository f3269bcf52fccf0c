"""How far a result may be from the float64 reference. All tolerances of the tests are derived here.

``bounded`` computes a bound along with a formula, ``operators`` has bounds of operators, ``models``
judges whole models, and ``chance`` what is random. All but the last begin with ``units``.
"""

from tests.tolerances.bounded import Bounded, clipping, joined, number
from tests.tolerances.chance import binomial_bound, rounding_step
from tests.tolerances.models import Exact, assert_as_exact, computed_exactly
from tests.tolerances.operators import (
    attention_errors,
    bag_errors,
    cross_entropy_errors,
    gelu_errors,
    int8_errors,
    interaction_errors,
    roi_align_error,
    roi_align_position_error,
)
from tests.tolerances.units import (
    ARITHMETIC,
    BUILTIN_ULPS,
    CHUNK,
    LANES,
    additions,
    by_hand,
    unit_roundoff,
)

__all__ = [
    "ARITHMETIC",
    "BUILTIN_ULPS",
    "CHUNK",
    "LANES",
    "Bounded",
    "Exact",
    "additions",
    "assert_as_exact",
    "attention_errors",
    "bag_errors",
    "binomial_bound",
    "by_hand",
    "clipping",
    "computed_exactly",
    "cross_entropy_errors",
    "gelu_errors",
    "int8_errors",
    "interaction_errors",
    "joined",
    "number",
    "roi_align_error",
    "roi_align_position_error",
    "rounding_step",
    "unit_roundoff",
]
