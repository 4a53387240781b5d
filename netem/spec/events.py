"""Events by time: loss that begins at a moment of the run and lasts for a while."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from netem.spec.fields import PositiveTime, Ratio, Spec, Time


class Event(Spec):
    """`at`: seconds since the programs run."""

    at_s: Annotated[Time, Field(alias="at")]
    for_s: Annotated[PositiveTime | None, Field(alias="for")] = None
    """None: until the end of the run."""
    loss: Ratio
    on: tuple[str, ...] = ()
    """`worker1.up`, `worker*.down`; none: all workers, up."""
    match: Literal["data", "all"] = "data"
