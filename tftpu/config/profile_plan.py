"""Parses `train.profile`, the option that says which steps a run profiles."""

import re
from typing import NamedTuple

from tftpu.errors import UserError


class ProfilePlan(NamedTuple):
    """The windows of steps to profile, and whether slow device loops are profiled as well.

    Attributes:
        windows: pairs of a window's first step and the step after its last.
        slow: whether steps after an unusually slow device loop are profiled.
    """

    windows: tuple[tuple[int, int], ...]
    slow: bool


def profile_plan(text: str) -> ProfilePlan:
    """Parses a profile plan, such as "100:110,slow": a window, and the steps after slow loops.

    Raises:
        UserError: the text has another form.
    """
    windows, slow = [], False
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+):(\d+)", item)
        if item == "slow":
            slow = True
        elif match and int(match[1]) < int(match[2]):
            windows.append((int(match[1]), int(match[2])))
        else:
            raise UserError(
                f"train.profile is {text!r}: it must be 'slow', or FIRST:LAST with FIRST below "
                "LAST, such as 100:110, or several of these separated by commas."
            )
    return ProfilePlan(tuple(windows), slow)
