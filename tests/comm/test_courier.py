from __future__ import annotations

import gc
import threading
import time
from typing import NoReturn

import pytest

from dthpc.comm.courier import Courier


def couriers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "courier"]


def test_calls_are_made_in_order_by_another_thread() -> None:
    courier = Courier()
    made: list[int] = []
    threads = set()
    for number in range(20):
        courier.hand_in([lambda n=number: made.append(n), lambda: threads.add(threading.get_ident())])  # type: ignore[misc]
    courier.finish()
    assert made == list(range(20))
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_what_a_call_raises_is_raised_by_finish_once_and_later_calls_are_left_out() -> None:
    courier = Courier()
    made = []

    def fail() -> NoReturn:
        raise ValueError("lost")

    courier.hand_in([fail, lambda: made.append(1)])
    courier.hand_in([lambda: made.append(2)])
    with pytest.raises(ValueError, match="lost"):
        courier.finish()
    courier.hand_in([lambda: made.append(3)])
    courier.finish()
    assert made == [3]


def test_who_hands_in_too_much_waits() -> None:
    courier = Courier(waiting=1)
    gate = threading.Event()
    courier.hand_in([lambda: gate.wait() and None])
    while not courier._calls.empty():
        time.sleep(0.001)
    courier.hand_in([])
    third = threading.Thread(target=courier.hand_in, args=([],))
    third.start()
    third.join(timeout=0.1)
    assert third.is_alive()
    gate.set()
    third.join()
    courier.finish()


def test_the_thread_ends_with_its_courier() -> None:
    gc.collect()
    before = len(couriers())
    courier = Courier()
    assert len(couriers()) == before + 1
    del courier
    gc.collect()
    assert len(couriers()) == before
