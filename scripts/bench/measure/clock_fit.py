"""Fits the parameters of the time model to published runs, and measures its error on runs that a fit did not use.

A fit minimizes Huber's loss of the logarithm of the time. Every source has the same weight, however many runs it has.
Each parameter has a prior with a source of its own, so that it stays near a measured value where the runs say little.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Prior:
    """A value, the standard deviation of its logarithm, and where both come from."""

    value: float
    deviation: float
    source: str


PRIORS: Final = {
    "a100 matmul": Prior(0.80, 0.1, "0.869 at best (stas00/ml-engineering, compute/accelerator)"),
    "h100 matmul": Prior(0.72, 0.15, "shapes level off at 0.81 (openxla/xla, sm_90); power then limits the clock"),
    "a100 attention": Prior(0.58, 0.15, "FlashAttention-2, causal: 0.46 to 0.51 (liangan1/GPU_travel)"),
    "h100 attention": Prior(0.36, 0.2, "FlashAttention-2 on H100: 0.35 (arXiv 2407.08608)"),
    "flash 1": Prior(0.5, 0.2, "FlashAttention-2 is about 2 times as fast (arXiv 2307.08691)"),
    "memory": Prior(0.88, 0.1, "assumption; 0.95 is NVIDIA's DRAM utilization"),
    "fusion": Prior(1.0, 0.4, "assumption: everything between two products is one kernel"),
    "kernel seconds": Prior(5e-6, 0.3, "6 to 7 us in 267 measured products (openxla/xla, sm_90, sm_100)"),
    "op seconds": Prior(6e-6, 0.3, "assumption; published launch times are 5 us and more"),
    "contention": Prior(0.1, 0.7, "assumption: NCCL's kernels take some of the multiprocessors"),
    "network": Prior(0.75, 0.15, "assumption; nccl-tests reach 0.8 to 0.95 with large messages"),
}  # fmt: skip
NAMES: Final = tuple(PRIORS)
_RUN_DEVIATION, _HUBER, _WEIGHT = 0.1, 0.12, 4.0
"""Deviation of a run, errors from which on the loss is linear, and the weight of a source in runs."""


@dataclass(frozen=True, slots=True)
class Linear:
    """Errors of all runs near a point: logarithms of predicted over published seconds, and their derivatives.

    Attributes:
        point: logarithms of the parameters.
        errors: of each run at the point.
        slopes: runs × parameters.
    """

    sources: Sequence[str]
    point: Array
    errors: Array
    slopes: Array

    def at(self, point: Array) -> Array:
        moved: Array = self.errors + self.slopes @ (point - self.point)
        return moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Fold:
    """What is known without one source: the parameters, and factors of the predicted time."""

    source: str
    point: Array
    low: float
    high: float


def linearize(sources: Sequence[str], point: Array, errors: Callable[[Mapping[str, float]], Array]) -> Linear:
    step = 0.05
    base = errors(values_of(point))
    columns = []
    for index in range(len(NAMES)):
        moved = point.copy()
        moved[index] += step
        columns.append((errors(values_of(moved)) - base) / step)
    return Linear(sources, point, base, np.stack(columns, axis=1))


def start() -> Array:
    return np.log([prior.value for prior in PRIORS.values()])


def values_of(point: Array) -> dict[str, float]:
    return dict(zip(NAMES, (float(value) for value in np.exp(point)), strict=True))


def fit(linear: Linear, used: NDArray[np.bool_]) -> Array:
    """Return the logarithms of the parameters that fit some of the runs best."""
    counts = Counter(source for source, use in zip(linear.sources, used, strict=True) if use)
    weights = np.array([_WEIGHT / counts[s] if u else 0.0 for s, u in zip(linear.sources, used, strict=True)])
    deviations, prior = np.array([each.deviation for each in PRIORS.values()]), start()
    point = linear.point
    for _ in range(30):
        distance = np.maximum(np.abs(linear.at(point)), 1e-9)
        weight = weights / _RUN_DEVIATION**2 * np.minimum(1, _HUBER / distance)
        normal = linear.slopes.T @ (linear.slopes * weight[:, None]) + np.diag(deviations**-2.0)
        target = linear.slopes @ linear.point - linear.errors
        point = np.linalg.solve(normal, linear.slopes.T @ (weight * target) + prior * deviations**-2.0)
    return point


def held_out(linear: Linear) -> Array:
    """Return the error of each run by the fit to all other sources."""
    sources, found = np.array(linear.sources), np.zeros(len(linear.sources))
    for source in dict.fromkeys(linear.sources):
        found[sources == source] = linear.at(fit(linear, sources != source))[sources == source]
    return found


def interval(errors: Array, sources: Sequence[str], coverage: float) -> tuple[float, float]:
    """Return factors of the predicted time that contain a fraction of the published ones.

    A run weighs the root of the inverse of its source's runs: one source has most runs, and some have a single one.
    """
    counts = Counter(sources)
    weights = np.array([counts[source] ** -0.5 for source in sources])
    order = np.argsort(-errors)
    share = np.cumsum(weights[order]) / weights.sum()
    first, last = (int(np.searchsorted(share, tail)) for tail in ((1 - coverage) / 2, (1 + coverage) / 2))
    factors = np.exp(-errors[order])
    return float(factors[first]), float(factors[min(last, len(factors) - 1)])


def folds(linear: Linear, coverage: float) -> Iterator[Fold]:
    """Yield each source with a fit to all others and the interval of their errors by fits without their source."""
    sources = np.array(linear.sources)
    for source in dict.fromkeys(linear.sources):
        others = sources != source
        kept = [each for each in linear.sources if each != source]
        rest = Linear(kept, linear.point, linear.errors[others], linear.slopes[others])
        low, high = interval(held_out(rest), kept, coverage)
        yield Fold(source=source, point=fit(linear, others), low=low, high=high)
