from __future__ import annotations

import errno
import os
import pickle

import pytest

from dthpc.checkpoint.errors import CheckpointError, PeerFailure, StorageError, os_error_within, remedy
from dthpc.errors import UserError


def caught(act: object) -> BaseException:
    """The exception that a call ends with."""
    with pytest.raises(BaseException) as info:  # noqa: PT011
        act()  # type: ignore[operator]
    return info.value


def refused() -> None:
    os.rmdir("/proc")  # noqa: PTH106


def wrapped_as_cause() -> None:
    try:
        refused()
    except OSError as error:
        raise RuntimeError("torch says something else") from error


def wrapped_twice_by_context() -> None:
    try:
        wrapped_as_cause()
    except RuntimeError:
        raise ValueError("and hides it once more")  # noqa: B904


def hidden_on_purpose() -> None:
    try:
        refused()
    except OSError:
        raise ValueError("from None") from None


@pytest.mark.parametrize("act", [refused, wrapped_as_cause, wrapped_twice_by_context, hidden_on_purpose])
def test_the_systems_error_is_found_below_what_hides_it(act: object) -> None:
    found = os_error_within(caught(act))
    assert found is not None
    assert found.errno in (errno.EBUSY, errno.EPERM, errno.EACCES, errno.EROFS)


def test_the_outermost_of_two_is_the_one_that_counts() -> None:
    outer, inner = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")
    outer.__cause__ = inner
    assert os_error_within(outer) is outer


def test_an_error_without_a_number_says_nothing_and_is_passed_over() -> None:
    outer, inner = OSError("something"), OSError(errno.EIO, "broken")
    assert os_error_within(outer) is None
    outer.__cause__ = inner
    assert os_error_within(outer) is inner


def test_errors_that_cause_each_other_are_looked_at_once() -> None:
    first, second = ValueError("first"), RuntimeError("second")
    first.__cause__, second.__cause__ = second, first
    assert os_error_within(first) is None


def test_a_full_disk_can_be_mended() -> None:
    with pytest.raises(OSError, match="No space") as info, open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")
    advice = remedy(info.value.errno)
    assert advice is not None
    assert "free some space" in advice


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_a_user_can_mend_comes_with_advice(number: int) -> None:
    assert remedy(number)


@pytest.mark.parametrize("number", [None, 0, errno.EIO, errno.ENOENT, errno.ESTALE])
def test_where_nothing_is_known_nothing_is_advised(number: int | None) -> None:
    assert remedy(number) is None


def test_only_what_can_be_mended_is_the_users() -> None:
    mendable = StorageError("writing step 5 failed", instead="free some space")
    assert isinstance(mendable, CheckpointError)
    assert isinstance(mendable, UserError)
    assert str(mendable) == "writing step 5 failed. Instead: free some space"
    assert not isinstance(CheckpointError("broken"), UserError)
    assert not isinstance(PeerFailure("another rank failed"), CheckpointError)


def test_the_error_travels_between_processes() -> None:
    error = StorageError("writing step 5 failed", key="run.root", value="/full", instead="free some space")
    copy = pickle.loads(pickle.dumps(error))
    assert copy.message() == error.message()
    assert isinstance(copy, UserError)
