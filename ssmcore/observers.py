"""Who is told what a step did. Off the hot path when nobody listens: an empty tuple is iterated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ssmcore.plan import StepPlan


class Observer(Protocol):
    """Told after a step was planned and after it was run; must not change what it is shown."""

    def step_planned(self, plan: StepPlan) -> None:
        """A step was planned; `plan` is valid until the next step is planned."""
        ...

    def step_run(self, plan: StepPlan, seconds: float) -> None:
        """The step ran and its tokens were sampled, in `seconds` of wall time."""
        ...
