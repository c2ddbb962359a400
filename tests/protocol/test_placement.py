"""Servers carry their shares; the closed forms agree with loads counted link by link."""

import pytest
import torch

from paceline import models
from paceline.protocol.chunks import ParameterSize, cut
from paceline.protocol.placement import (
    cut_and_deal,
    deal,
    dedicated_seconds,
    exchange_seconds,
    loads_bytes,
    optimal_seconds,
    ring_seconds,
    seats,
)
from paceline.protocol.plan import (
    LOOPBACK_CHUNK_BYTES,
    SHARED_CHUNK_BYTES,
    TRAVELLING_CHUNK_BYTES,
)


def model_sizes(name):
    with torch.device("meta"):
        model = models.build(name)
    return [ParameterSize(name=n, elements=p.numel()) for n, p in model.named_parameters()]


@pytest.mark.parametrize("servers", [2, 3, 4])
@pytest.mark.parametrize(
    "chunk_bytes",
    [TRAVELLING_CHUNK_BYTES, SHARED_CHUNK_BYTES, LOOPBACK_CHUNK_BYTES, (1 << 20, 64 << 10)],
)
@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50"])
def test_no_server_has_more_than_a_twentieth_above_the_mean(name, chunk_bytes, servers):
    shares = [1 / servers] * servers
    layout, owners = cut_and_deal(model_sizes(name), shares, *chunk_bytes)
    loads = loads_bytes(layout.chunks, owners, servers)
    assert max(loads) <= 1.05 * sum(loads) / servers


def test_chunks_are_as_large_as_an_even_deal_allows():
    one = [ParameterSize(name="w", elements=24 << 20)]
    layout, _ = cut_and_deal(one, [0.25] * 4, 4 << 20, 256 << 10)
    assert [chunk.size_bytes for chunk in layout.chunks] == [4 << 20] * 24
    uneven = [ParameterSize(name=f"w{i}", elements=700_000) for i in range(9)]
    layout, owners = cut_and_deal(uneven, [0.5] * 2, 4 << 20, 256 << 10)
    assert max(loads_bytes(layout.chunks, owners, 2)) <= 1.05 * 0.5 * layout.size_bytes
    assert 1 << 20 < max(chunk.size_bytes for chunk in layout.chunks) < 700_000 * 4


def test_a_small_model_is_cut_so_that_every_seat_has_some_chunks_and_no_further():
    small = [ParameterSize(name="w", elements=1 << 20)]
    layout, owners = cut_and_deal(small, [0.25] * 4, 4 << 20, 64 << 10)
    assert all(owners.count(seat) == 4 for seat in range(4))
    layout, _ = cut_and_deal(small, [0.9, 0.1], 4 << 20, 1 << 20)
    assert {chunk.size_bytes for chunk in layout.chunks} == {1 << 20}


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_optimal_shares_make_every_link_finish_together(workers, servers):
    if servers >= workers:
        pytest.skip("with as many servers as workers optimal is dedicated")
    table = seats("optimal", workers, servers)
    assert sum(seat.share for seat in table) == pytest.approx(1)
    inside, apart = table[0].share, table[-1].share
    worker_link = (1 - inside) + (workers - 1) * inside
    server_link = workers * apart
    assert worker_link == pytest.approx(server_link)
    assert worker_link == pytest.approx(optimal_seconds(workers, servers, 1, 1))


def test_optimal_lies_between_its_neighbours():
    assert optimal_seconds(4, 2, 1, 1) < ring_seconds(4, 1, 1)
    assert optimal_seconds(4, 2, 1, 1) < dedicated_seconds(4, 2, 1, 1)
    assert exchange_seconds("optimal", 4, 4, 1, 1) == dedicated_seconds(4, 4, 1, 1) == 1


def test_shares_are_dealt_unevenly_where_asked():
    layout = cut([ParameterSize(name="w", elements=10_000_000)], 256 << 10)
    owners = deal(layout.chunks, [0.6, 0.3, 0.1])
    loads = loads_bytes(layout.chunks, owners, 3)
    total = sum(loads)
    assert [load / total for load in loads] == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_colocated_seats_are_the_workers():
    assert [seat.member for seat in seats("colocated", 2, 0)] == ["worker0", "worker1"]
    assert [seat.member for seat in seats("dedicated", 2, 2)] == ["server0", "server1"]
