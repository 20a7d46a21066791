"""A small set of cases in which every pair of values stands together that any case has.

Most faults of a combination show with two of its values (Kuhn, Wallace and Gallo 2004, "Software
fault interactions and implications for software testing"). Cases that cannot be are simply not
among those to choose from, so constraints need no language of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt


def pairwise_cover(
    cases: Sequence[Sequence[Hashable]], seed: int = 0, costs: Sequence[float] | None = None
) -> list[int]:
    """Indices of cases, ascending, that together hold every pair of values found in any case.

    Greedy: the case with the most pairs that are still missing comes next.

    Args:
        cases: values of one case each, axis by axis; all of the same length.
        seed: breaks ties; same seed, same choice.
        costs: of each case; of those with as many missing pairs a cheapest is taken.
    """
    if not cases:
        return []
    ids = _pair_ids(cases)
    order = np.random.default_rng(seed).permutation(len(cases))
    if costs is not None:
        order = order[np.argsort(np.asarray(costs)[order], kind="stable")]
    ids = ids[order]
    missing = np.ones(int(ids.max()) + 1, dtype=np.bool_)
    chosen: list[int] = []
    while missing.any():
        best = int(missing[ids].sum(axis=1).argmax())
        missing[ids[best]] = False
        chosen.append(int(order[best]))
    return sorted(chosen)


def _pair_ids(cases: Sequence[Sequence[Hashable]]) -> npt.NDArray[np.int64]:
    """(cases, pairs of axes): a number for each pair of values; a lone axis pairs with itself."""
    axes = range(len(cases[0]))
    known: dict[Hashable, int] = {}
    pairs = list(combinations(axes, 2)) or [(0, 0)]
    return np.array(
        [
            [known.setdefault((a, b, case[a], case[b]), len(known)) for a, b in pairs]
            for case in cases
        ],
        dtype=np.int64,
    )
