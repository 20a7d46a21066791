"""The block pool alone: references, least recently used eviction, failed allocations."""

from __future__ import annotations

import pytest

from ssmcore.engine.blocks import BlockPool, PrefixHasher


def cached(pool: BlockPool, *digests: bytes) -> list[int]:
    """Publish one slot for each digest and leave them to the cache, in this order."""
    slots = pool.allocate(len(digests))
    for slot, digest in zip(slots, digests, strict=True):
        pool.publish(slot, digest)
    for slot in slots:
        pool.release(slot)
    return slots


def test_the_null_slot_is_never_allocated():
    pool = BlockPool(4)
    assert sorted(pool.allocate(3)) == [1, 2, 3]
    assert pool.allocate(1) is None


def test_a_failed_allocation_leaves_nothing_behind():
    pool = BlockPool(5)
    slots = cached(pool, b"a", b"b")
    pool.allocate(1)
    before = (pool.num_free, pool.num_cached, pool.num_used, list(pool.freed))
    assert pool.allocate(4) is None
    assert pool.allocate(3, keep=slots[0]) is None
    assert (pool.num_free, pool.num_cached, pool.num_used, list(pool.freed)) == before
    assert pool.find(b"a") == slots[0]
    assert pool.find(b"b") == slots[1]


def test_the_least_recently_used_state_is_evicted_first():
    pool = BlockPool(4)
    first, second, third = cached(pool, b"a", b"b", b"c")
    pool.refer(first)
    pool.release(first)
    assert pool.allocate(2) == [second, third]
    assert [pool.find(digest) for digest in (b"a", b"b", b"c")] == [first, None, None]
    assert pool.evictions == 2


def test_free_slots_go_before_cached_ones():
    pool = BlockPool(4)
    cached(pool, b"a")
    assert pool.allocate(2) is not None
    assert pool.find(b"a") is not None


def test_a_shared_slot_stays_until_its_last_reference():
    pool = BlockPool(3)
    (slot,) = cached(pool, b"a")
    pool.refer(slot)
    pool.refer(slot)
    pool.release(slot)
    assert pool.allocate(2) is None
    pool.release(slot)
    assert (pool.num_cached, pool.num_used) == (1, 0)


def test_a_second_slot_of_the_same_prefix_is_freed_not_cached():
    pool = BlockPool(4)
    one, two = pool.allocate(2)
    pool.publish(one, b"a")
    pool.publish(two, b"a")
    pool.release(two)
    pool.release(one)
    assert pool.find(b"a") == one
    assert (pool.num_free, pool.num_cached) == (2, 1)


def test_releasing_too_often_is_a_fault():
    pool = BlockPool(3)
    (slot,) = pool.allocate(1)
    pool.release(slot)
    with pytest.raises(RuntimeError, match=f"slot {slot}"):
        pool.release(slot)


def test_clearing_the_cache_keeps_slots_in_use():
    pool = BlockPool(4)
    cached(pool, b"a", b"b")
    (slot,) = pool.allocate(1)
    pool.clear_cache()
    assert (pool.num_free, pool.num_cached, pool.num_used) == (2, 0, 1)
    pool.release(slot)
    assert pool.num_free == 3


def test_a_prefix_hash_depends_on_all_tokens_before_it_and_on_the_process():
    hasher = PrefixHasher(range(4, 13, 4))

    def hashes(tokens, of=hasher):
        found: list[bytes] = []
        of.extend(found, tokens, len(tokens) // 4)
        return found

    one, two = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([0, 2, 3, 4, 5, 6, 7, 8])
    assert one[0] != two[0]
    assert one[1] != two[1]
    assert hashes([1, 2, 3, 4, 9, 9, 9, 9])[0] == one[0]
    assert hashes([1, 2, 3, 4], PrefixHasher(range(4, 13, 4)))[0] != one[0]
    grown = hashes([1, 2, 3, 4])
    hasher.extend(grown, [1, 2, 3, 4, 5, 6, 7, 8], 2)
    assert grown == one
