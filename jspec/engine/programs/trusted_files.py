"""Checks that only this user and root can have written a file or folder, for compiled programs,
which are executed."""

from __future__ import annotations

import contextlib
import functools
import os
import stat

if os.name == "posix":
    import grp
    import pwd


def distrust(status: os.stat_result) -> str:
    """Return why another user may have written a file or folder, or "" if none can."""
    if os.name != "posix":
        return ""
    if status.st_uid not in (0, os.geteuid()):
        return f"is owned by user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "may be written by all users"
    if status.st_mode & stat.S_IWGRP and _has_other_users(status.st_gid):
        return f"may be written by group {status.st_gid}"
    return ""


@functools.cache
def _has_other_users(group: int) -> bool:
    users = pwd.getpwall()
    own = {user.pw_name for user in users if user.pw_uid in (0, os.geteuid())}
    members = {user.pw_name for user in users if user.pw_gid == group}
    with contextlib.suppress(KeyError):  # the group has no name
        members.update(grp.getgrgid(group).gr_mem)
    return not members <= own
