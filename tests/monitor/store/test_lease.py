"""Who is known to be gone: a process of this host that was here and ended, and nobody else."""

import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from runwatch.monitor.store.lease import is_gone, this_process


@pytest.fixture(scope="module")
def ended() -> str:
    """The name of a process that has ended."""
    words = [sys.executable, "-P", "-c", "from runwatch.monitor.store.lease import this_process; print(this_process())"]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def test_a_process_that_ended_is_gone_and_this_one_is_not(ended: str) -> None:
    assert ended != this_process()
    assert is_gone(ended)
    assert not is_gone(this_process())


@pytest.mark.parametrize(
    "changed",
    [
        lambda name: "elsewhere" + name,
        lambda name: name + "0",
        lambda name: name.partition("/")[0],
        lambda name: name.partition("/")[0] + "/",
        lambda name: name.replace(":", ":x"),
        lambda name: name.replace(":", ":" + "9" * 30),
        lambda name: re.sub(r":\d+/", ":1/", name),
        lambda _: "",
        lambda _: f"{os.getpid()}",
    ],
)
def test_who_may_still_be_there_is_not_gone(ended: str, changed: Callable[[str], str]) -> None:
    assert not is_gone(changed(ended))
