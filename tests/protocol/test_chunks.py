"""Chunks cover every element once, keep groups and kinds apart, and stay within their size."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.protocol.chunks import ParameterSize, cut

parameters = st.lists(
    st.builds(
        ParameterSize,
        name=st.just("p"),
        elements=st.integers(1, 200_000),
        group=st.integers(0, 1),
        kind=st.sampled_from(["float32"]),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(parameters=parameters, chunk_bytes=st.sampled_from([16384, 65536, 1 << 20]))
def test_every_element_lies_in_one_chunk(parameters, chunk_bytes):
    layout = cut(parameters, chunk_bytes)
    covered = [0] * len(layout.flats)
    for flat in range(len(layout.flats)):
        spans = sorted((c.start, c.stop) for c in layout.chunks if c.flat == flat)
        assert spans[0][0] == 0
        for (_, stop), (start, _) in itertools.pairwise(spans):
            assert stop == start
        covered[flat] = spans[-1][1]
    assert covered == [flat.elements for flat in layout.flats]
    assert all(chunk.size_bytes <= chunk_bytes + 64 for chunk in layout.chunks)
    for parameter, place in zip(parameters, layout.places, strict=True):
        assert place.stop - place.start == parameter.elements
        assert layout.flats[place.flat].group == parameter.group


@settings(max_examples=50, deadline=None)
@given(parameters=parameters)
def test_places_do_not_overlap(parameters):
    layout = cut(parameters, 65536)
    for flat in range(len(layout.flats)):
        spans = sorted((p.start, p.stop) for p in layout.places if p.flat == flat)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


def test_a_chunk_knows_its_first_use_and_its_parameters():
    sizes = [("a", 10), ("b", 40_000), ("c", 10)]
    layout = cut([ParameterSize(name=n, elements=e) for n, e in sizes], 65536)
    assert [chunk.first_use for chunk in layout.chunks] == sorted(
        chunk.first_use for chunk in layout.chunks
    )
    assert layout.chunks[0].parameters == (0, 1)
    assert {i for chunk in layout.chunks for i in chunk.parameters} == {0, 1, 2}


def test_small_parameters_share_a_chunk_and_kinds_do_not():
    small = [ParameterSize(name=f"p{i}", elements=10) for i in range(50)]
    assert len(cut(small, 65536).chunks) == 1
    half = ParameterSize(name="h", elements=10, element_bytes=2, kind="bfloat16")
    assert len(cut([*small, half], 65536).chunks) == 2
