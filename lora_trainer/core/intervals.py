"""The interval of a mean of few values, by Student's t. Standard library only."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# 97.5 % quantiles for 1 to 9 degrees of freedom: a 95 % interval over 2 to 10 values.
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
FEWEST_VALUES, MOST_VALUES = 2, len(T_QUANTILES) + 1


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean of 2 to 10 values, and the half width of its 95 % interval."""
    reach = T_QUANTILES[len(values) - FEWEST_VALUES] * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), reach
