"""Who owns which slot of the state pool, and which slots hold a state that others may start from.

Slots are counted references. A slot that nobody refers to is free, or, where it holds a published
state, cached: it may be found again by its prefix hash until it is evicted, least recently used
first. Hashes are a chain of keyed BLAKE2b digests over the token ids between boundaries, the key
drawn anew by every process, so nobody can make two prefixes meet.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

DIGEST_BYTES = 32


class PrefixHasher:
    """Hashes of a token sequence's prefixes, each computed from the one before it.

    Args:
        boundaries: token counts at which a prefix is hashed, ascending.
    """

    def __init__(self, boundaries: Sequence[int]) -> None:
        self.boundaries = boundaries
        self._key = os.urandom(DIGEST_BYTES)

    def extend(self, hashes: list[bytes], tokens: Sequence[int], count: int) -> None:
        """Append hashes until there are `count`: of the first `count` boundaries' prefixes."""
        while len(hashes) < count:
            at = len(hashes)
            start = self.boundaries[at - 1] if at else 0
            block = array("q", tokens[start : self.boundaries[at]]).tobytes()
            previous = hashes[-1] if hashes else b""
            digest = blake2b(previous + block, digest_size=DIGEST_BYTES, key=self._key).digest()
            hashes.append(digest)


class BlockPool:
    """Reference counts, free list and prefix cache over slots `1..num_slots - 1`.

    Attributes:
        freed: slots that lost their content since the list was last cleared (for poisoning).
        evictions: cached states given up so far.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._references = [0] * num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        self._slot_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.freed: list[int] = []
        self.evictions = 0

    @property
    def num_usable(self) -> int:
        """Slots in all, without the null slot."""
        return self.num_slots - 1

    @property
    def num_free(self) -> int:
        """Slots that hold nothing."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Slots that hold a published state and are referred to by nobody."""
        return len(self._cached)

    @property
    def num_used(self) -> int:
        """Slots that requests refer to."""
        return self.num_usable - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """Slots that could be allocated now: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    def allocate(self, count: int, keep: int = 0) -> list[int] | None:
        """Take `count` slots with one reference each; None, and nothing changed, if there are not
        so many.

        A cached slot `keep` is not taken.
        """
        if count > self.num_available - (keep in self._cached):
            return None
        return [self._take(keep) for _ in range(count)]

    def _take(self, keep: int) -> int:
        if self._free:
            slot = self._free.pop()
        else:
            slot = next(slot for slot in self._cached if slot != keep)
            del self._cached[slot]
            self._forget(slot)
            self.freed.append(slot)
            self.evictions += 1
        self._references[slot] = 1
        return slot

    def refer(self, slot: int) -> None:
        """Add a reference to a slot that is in use or cached."""
        if self._references[slot] == 0:
            del self._cached[slot]
        self._references[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference; the last one leaves the slot cached if it is published, else free."""
        left = self._references[slot] - 1
        if left < 0:
            raise RuntimeError(f"slot {slot} was released more often than it was taken")
        self._references[slot] = left
        if left:
            return
        if slot in self._hash_of:
            self._cached[slot] = None
        else:
            self._free.append(slot)
            self.freed.append(slot)

    def publish(self, slot: int, digest: bytes) -> None:
        """Let others find a slot that is in use; only once the step that wrote its state has run.

        Where another slot holds the same state already, that one stays the one that is found.
        """
        if digest not in self._slot_of and slot not in self._hash_of:
            self._slot_of[digest] = slot
            self._hash_of[slot] = digest

    def find(self, digest: bytes) -> int | None:
        """Slot that holds the state after the prefix of that hash."""
        return self._slot_of.get(digest)

    def clear_cache(self) -> None:
        """Forget all published states; slots in use stay with their requests."""
        for slot in list(self._hash_of):
            self._forget(slot)
        self._free.extend(self._cached)
        self.freed.extend(self._cached)
        self._cached.clear()

    def _forget(self, slot: int) -> None:
        del self._slot_of[self._hash_of.pop(slot)]
