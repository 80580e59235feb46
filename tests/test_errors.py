from __future__ import annotations

import pickle

import pytest

from dthpc.errors import UserError, UserErrors, nearest, raise_together


def test_a_message_names_key_value_reason_and_remedy() -> None:
    error = UserError("too small", key="train.steps", value=0, instead="give at least 1")
    assert str(error) == "train.steps=0: too small. Instead: give at least 1"


def test_an_error_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(UserErrors([UserError("a", key="k"), UserError("b")])))
    assert [inner.why for inner in error.errors] == ["a", "b"]
    assert str(error) == "k: a\nb"


def test_one_error_is_raised_as_itself_and_none_not_at_all() -> None:
    raise_together([])
    with pytest.raises(UserError) as caught:
        raise_together([UserError("only")])
    assert not isinstance(caught.value, UserErrors)


def test_nearest_offers_close_words_first_and_all_words_else() -> None:
    assert nearest("slrum", ["slurm", "local"]) == "did you mean slurm?"
    assert nearest("MPI", ["mpi", "nccl"]) == "did you mean mpi?"
    assert nearest("zzz", ["slurm", "local"]) == "valid ones are: local, slurm"


def test_a_kind_of_error_stays_its_kind_on_the_way() -> None:
    from dthpc.checkpoint.errors import CheckpointError, StorageError

    error = pickle.loads(pickle.dumps(StorageError("full", key="run.root", value="/x", instead="make room")))
    assert isinstance(error, CheckpointError)
    assert str(error) == "run.root=/x: full. Instead: make room"
