import numpy as np
import pytest

from lightning_norms.data.sampling import BLOCK, ValidationOrder, WindowOrder, permutation


def test_the_permutation_sorts_by_splitmix64():
    # The published first outputs of splitmix64 for the seed 1234567 are 6457827717110365317, 3203168211198807973,
    # 9817491932198370423, 4593380528125082431, 16408922859458223821.
    assert permutation(1234567, 5).tolist() == [1, 3, 0, 2, 4]
    assert sorted(permutation(3, 1000).tolist()) == list(range(1000))


@pytest.mark.parametrize("key", [0, 1, 2**64 - 0x9E3779B97F4A7C15, 2**64 - 1])
@pytest.mark.parametrize("count", [0, 1, BLOCK - 1, BLOCK, 2 * BLOCK + 1])
def test_the_permutation_is_that_of_sorting_positions_by_their_hash(key, count):
    mask, hashes = 2**64 - 1, []
    for number in range(1, count + 1):
        mixed = key + number * 0x9E3779B97F4A7C15 & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        hashes.append(mixed ^ mixed >> 31)
    order = permutation(key, count)
    assert order.dtype == np.int64
    assert order.tolist() == sorted(range(count), key=hashes.__getitem__)
    assert not order.flags.writeable  # it is shared by all who ask


def all_offsets(order, steps):
    return [[order.offsets(step, rank).tolist() for rank in range(order.ranks)] for step in steps]


@pytest.mark.parametrize(("batch_size", "ranks"), [(1, 1), (3, 1), (2, 2), (1, 5)])
def test_a_pass_visits_windows_that_do_not_overlap_and_stay_inside(batch_size, ranks):
    order = WindowOrder(tokens=1003, context_length=10, batch_size=batch_size, ranks=ranks, seed=4)
    for number in range(20):
        steps = range(number * order.steps_per_pass, (number + 1) * order.steps_per_pass)
        offsets = sorted(o for batch in all_offsets(order, steps) for rank in batch for o in rank)
        assert len(offsets) == order.steps_per_pass * batch_size * ranks > order.windows - batch_size * ranks
        assert len(set(offsets)) == len(offsets)
        assert {offset % 10 for offset in offsets} == {order.phase(number)}
        assert offsets[0] >= 0
        assert offsets[-1] + 10 + 1 <= 1003


def test_phases_differ_between_passes_and_reach_every_value():
    order = WindowOrder(tokens=1003, context_length=10, batch_size=1)
    assert {order.phase(number) for number in range(100)} == set(range(10))


def test_seeds_and_passes_have_their_own_order_and_the_same_seed_the_same():
    order = WindowOrder(tokens=1003, context_length=10, batch_size=4, seed=1)
    first, second = all_offsets(order, range(24)), all_offsets(order, range(24, 48))
    assert first != second
    assert first != all_offsets(WindowOrder(1003, 10, 4, seed=2), range(24))
    assert first == all_offsets(WindowOrder(1003, 10, 4, seed=1), range(24))


def test_ranks_share_the_batches_of_one_process():
    one = WindowOrder(tokens=1003, context_length=10, batch_size=4)
    two = WindowOrder(tokens=1003, context_length=10, batch_size=2, ranks=2)
    for step in range(60):
        shared = [o for rank in range(2) for o in two.offsets(step, rank).tolist()]
        assert sorted(shared) == sorted(one.offsets(step, 0).tolist())


@pytest.mark.parametrize(
    ("tokens", "windows", "last_phase"), [(11, 1, 0), (12, 1, 1), (20, 1, 9), (29, 1, 9), (30, 2, 9)]
)
def test_short_streams_have_as_many_windows_as_fit_at_every_phase(tokens, windows, last_phase):
    order = WindowOrder(tokens=tokens, context_length=10, batch_size=1)
    assert order.windows == windows
    phases = {order.phase(number) for number in range(200)}
    assert max(phases) == last_phase
    assert max(phases) + windows * 10 + 1 <= tokens


def test_too_little_text_says_what_to_change():
    with pytest.raises(ValueError, match="10 tokens make 0 windows of context_length=10: at least 11 tokens"):
        WindowOrder(tokens=10, context_length=10, batch_size=1)
    with pytest.raises(
        ValueError, match=r"35 tokens make 2 window\(s\).*batch_size=2 x 2 rank\(s\).*smaller batch_size"
    ):
        WindowOrder(tokens=35, context_length=10, batch_size=2, ranks=2)


@pytest.mark.parametrize("tokens", [2, 10, 11, 12, 250, 251, 252])
@pytest.mark.parametrize("ranks", [1, 3])
def test_validation_targets_tile_the_stream_exactly_once(tokens, ranks):
    order = ValidationOrder(tokens=tokens, context_length=10, batch_size=2, ranks=ranks)
    offsets = [
        o for batch in range(order.batches) for rank in range(ranks) for o in order.offsets(batch, rank).tolist()
    ]
    targets = sorted(t for offset in offsets for t in range(offset + 1, min(offset + 11, tokens)))
    assert targets == list(range(1, tokens))
    assert all(len(order.offsets(batch, rank)) <= 2 for batch in range(order.batches) for rank in range(ranks))


def test_the_first_validation_batches_come_from_everywhere():
    order = ValidationOrder(tokens=100_001, context_length=10, batch_size=10)
    sample = [o for batch in range(10) for o in order.offsets(batch, 0).tolist()]
    by_tenth = [sum(start <= o < start + 10_000 for o in sample) for start in range(0, 100_000, 10_000)]
    assert sum(by_tenth) == 100
    assert min(by_tenth) >= 3
