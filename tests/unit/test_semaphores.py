"""A killed engine leaves no semaphore behind."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from forge_ray.serve_proxy import semaphores


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # its maker would have removed the name
def test_the_name_goes_and_the_lock_still_works() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    path = f"/dev/shm/sem.{vars(lock)['_semlock'].name.lstrip('/')}"
    assert os.path.exists(path)
    assert path in semaphores.unname()
    assert not os.path.exists(path)
    with lock:
        assert not lock.acquire(block=False)
    assert lock.acquire(block=False)
    lock.release()
