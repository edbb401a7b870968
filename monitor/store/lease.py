"""The name under which a daemon holds a run's lease, and whether that daemon is gone.

A lease expires by itself, but a daemon that died and was started again on its host need not wait for that.
"""

import os
import socket
from pathlib import Path


def this_process() -> str:
    """HOST:PID, and in which namespace the process id counts, since two containers may share a host's name."""
    return f"{socket.gethostname()}:{os.getpid()}/{_namespace()}"


def is_gone(holder: str) -> bool:
    """Whether `holder` was a process of this host and namespace that runs no longer; False where that can't be known."""
    name, _, namespace = holder.partition("/")
    host, _, pid = name.rpartition(":")
    if host != socket.gethostname() or namespace != _namespace() or not namespace or not pid.isdecimal():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # another user's, or no process id at all
        return False
    return False


def _namespace() -> str:
    """The process namespace's number; empty on a system without them, where nobody is known to be gone."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return ""
