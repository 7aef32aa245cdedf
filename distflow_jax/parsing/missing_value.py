"""Values that are there in name only."""

import math
from typing import Any


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or text or a list without content.

    >>> [is_missing(value) for value in (None, math.nan, " ", [], 0, False)]
    [True, True, True, True, False, False]
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return True
    if isinstance(value, str):
        return not value.strip()
    return hasattr(value, "__len__") and not len(value)
