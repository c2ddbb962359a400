"""Where gradients are put together: which bucket each goes into."""

from paceline.protocol.buckets import filled


def cut(*sizes, first=10, rest=100):
    return list(
        filled([size if isinstance(size, tuple) else (size, "") for size in sizes], first, rest)
    )


def test_a_large_gradient_leaves_with_what_came_before_it_and_waits_for_nothing_after_it():
    assert cut(4, 500, 3, 2) == [[0, 1], [2, 3]]


def test_the_first_bucket_is_small_and_the_others_are_filled():
    assert cut(6, 6, 60, 30, 10, 5) == [[0, 1], [2, 3, 4], [5]]


def test_a_bucket_holds_one_kind():
    assert cut((1, "a"), (1, "b"), (1, "b"), (1, "a")) == [[0], [1, 2], [3]]


def test_without_gradients_there_is_no_bucket():
    assert cut() == []
