"""A server that polls worker 0's store while it serves."""

import threading

import pytest
from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from paceline import architectures, spec
from paceline.errors import ExchangeError
from paceline.launch import Identity
from paceline.session import stores
from paceline.session.serving import Serving


class StoreOfALostWorker(Store):
    def check(self, keys):
        raise DistNetworkError("the job's store is gone")

    def get(self, key):
        raise DistNetworkError("the job's store is gone")


def test_who_was_lost_is_said_before_that_the_store_went_with_it(monkeypatch):
    asked = threading.Event()

    def serve(options, context):
        asked.wait(10)
        raise ExchangeError("worker0 was lost in step 3, and it spoke for all workers.")

    monkeypatch.setattr(architectures, "serve", serve)
    serving = Serving(spec.parse_architecture("server"))
    serving.start(None)
    threading.Timer(0.3, asked.set).start()
    with pytest.raises(ExchangeError, match="worker0 was lost in step 3"):
        serving.is_more(StoreOfALostWorker())


def test_who_waits_at_a_store_that_is_gone_says_so_and_nothing_of_a_deadline():
    with pytest.raises(ExchangeError, match="worker0 was lost, and the job's store with it"):
        stores.agree(StoreOfALostWorker(), Identity(index=1, workers=2), "a note", None)


def test_a_store_that_is_gone_is_an_error_of_its_own_where_nothing_else_failed(monkeypatch):
    monkeypatch.setattr("paceline.session.serving.NOTICE_SECONDS", 0.1)
    with pytest.raises(DistNetworkError):
        Serving(spec.parse_architecture("server")).is_more(StoreOfALostWorker())
