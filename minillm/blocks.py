"""Who owns which block of the KV cache, and which full blocks can be shared: `KVPool`.

The life of a block. It starts free. `allocate` hands it to one request (`refs` 1). When all its slots are computed,
`publish` gives it a digest, so that later requests with the same prefix find it (`match`) and share it (`refs` 2 and
more). `release` takes a reference away. At zero the block is free again but keeps its content and digest, so it can
still be matched. Only when it is handed out again is it forgotten. The free list is in order of last use: blocks
without content first, then the least recently used.

Paging: Kwon et al. 2023, PagedAttention, arXiv:2309.06180, section 4.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from . import kv

ROOT = -1  # the parent of a sequence's first block


def block_digest(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Name of a full block: 16 bytes that stand for its tokens and everything before them.

    parent: the digest of the block before, b"" for the first. Ids are hashed as 64-bit integers, so none is cut short.
    """
    # exercise 05.1
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()
    # end exercise 05.1


@dataclass
class Block:
    """What the pool knows of one block. digest, tokens and parent (a block number) are set while it can be matched."""

    refs: int = 0
    digest: bytes | None = None
    tokens: tuple[int, ...] = ()
    parent: int = ROOT


class KVPool:
    """Hands out, shares and takes back blocks. Knows numbers only; the tensors are in `kv.KVCache`.

    A request's `table` lists its blocks in order: the token at position p is in block table[p // block_size].
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        hash_fn: Callable[[bytes, Sequence[int]], bytes] | None = None,  # None: block_digest
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.hash_fn = hash_fn or block_digest
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.published: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out; those that are cached and not in use are among them."""
        return len(self.free)

    # ---- hand out and take back

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, and nothing changed, if there are not so many.

        They come from the front of the free list. Those that hold an old prompt are evicted: nobody finds them again.
        """
        # exercise 05.4
        if count > len(self.free):
            return None
        taken = [self.free.popitem(last=False)[0] for _ in range(count)]
        for number in taken:
            self._forget(number)
            self.blocks[number].refs = 1
        return taken
        # end exercise 05.4

    def share(self, table: Iterable[int]) -> None:
        """Add a reference to each block of `table` (a prefix hit, or a fork)."""
        for number in table:
            if self.blocks[number].refs == 0:
                del self.free[number]
            self.blocks[number].refs += 1

    def release(self, table: Sequence[int]) -> None:
        """Take a reference from each block of `table`. The last block goes first, so it is also evicted first.

        A block that nobody uses then is free. It keeps its content: it goes to the end of the free list, or to the
        front if it has no digest. RuntimeError if nobody used it before.
        """
        # exercise 05.3
        for number in reversed(table):
            block = self.blocks[number]
            if block.refs < 1:
                raise RuntimeError(f"block {number} is freed twice")
            block.refs -= 1
            if block.refs == 0:
                self.free[number] = None
                if block.digest is None:
                    self.free.move_to_end(number, last=False)
        # end exercise 05.3

    # ---- what the scheduler asks for

    def admit(self, hits: list[int], num_tokens: int) -> list[int] | None:
        """A table for `num_tokens` tokens that begins with the shared blocks `hits`; None if it does not fit."""
        idle = sum(self.blocks[number].refs == 0 for number in hits)
        count = kv.blocks_needed(num_tokens, self.block_size) - len(hits)
        if count > len(self.free) - idle:
            return None
        self.share(hits)
        return hits + (self.allocate(count) or [])

    def extend(self, table: list[int], start: int, end: int) -> list[tuple[int, int]] | None:
        """Make positions start..end-1 of a table writable. Returns (source, target) block copies to do before writing.

        Blocks are added at the end as needed. A block that others use too is replaced by a copy (copy-on-write).
        Returns None, and changes nothing, if the blocks do not suffice.
        """
        # exercise 04.3
        size = self.block_size
        shared = [i for i in range(start // size, min(len(table), -(-end // size))) if self.blocks[table[i]].refs > 1]
        count = max(0, kv.blocks_needed(end, size) - len(table))
        new = self.allocate(len(shared) + count)
        if new is None:
            return None
        copies = []
        for i in shared:
            copies.append((table[i], new[0]))
            self.release([table[i]])
            table[i] = new.pop(0)
        table.extend(new)
        return copies
        # end exercise 04.3

    # ---- prefix cache

    def match(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest cached prefix of `tokens`. Takes no reference.

        Only whole blocks, and never the last token: its logits are needed, so at least one token is computed.
        The digest finds a block; its tokens and its parent are compared too, since digests can collide.
        """
        # exercise 05.2
        hits: list[int] = []
        if not self.enable_prefix_caching:
            return hits
        digest, parent, size = b"", ROOT, self.block_size
        for start in range(0, (len(tokens) - 1) // size * size, size):
            content = tuple(tokens[start : start + size])
            digest = self.hash_fn(digest, content)
            number = self.published.get(digest)
            if number is None or self.blocks[number].tokens != content or self.blocks[number].parent != parent:
                break
            hits.append(number)
            parent = number
        return hits
        # end exercise 05.2

    def publish(self, table: list[int], digests: list[bytes], tokens: Sequence[int], num_computed: int) -> None:
        """Make the blocks of a request that are now fully computed findable.

        digests: those of the table's first blocks, as far as they were published before; extended in place.
        If an equal block is there already (two requests computed the same prefix at the same time), the table is
        switched to it and this request's own copy is freed. So each content exists once, and a cached block's parent
        is used by everyone who uses the block: it is never evicted before it.
        """
        if not self.enable_prefix_caching:
            return
        size = self.block_size
        for i in range(len(digests), num_computed // size):
            content = tuple(tokens[i * size : (i + 1) * size])
            digest = self.hash_fn(digests[-1] if digests else b"", content)
            if not self.publish_block(table, i, digest, content):
                return
            digests.append(digest)

    def publish_block(self, table: list[int], i: int, digest: bytes, content: tuple[int, ...]) -> bool:
        """Make the full block table[i], which holds `content`, findable as `digest`. False: it has to stay private.

        Its parent is table[i - 1], or ROOT for the first. If an equal block (same content, same parent) is published
        already, table[i] becomes that one, and this request's own copy is released. Private is a block whose parent
        has no digest (it was discarded), and one whose digest belongs to a different block (a collision).
        """
        # exercise 05.5
        parent = table[i - 1] if i else ROOT
        if i and self.blocks[parent].digest is None:
            return False
        number = self.published.setdefault(digest, table[i])
        block = self.blocks[number]
        if number == table[i]:
            block.digest, block.tokens, block.parent = digest, content, parent
        elif block.tokens != content or block.parent != parent:
            return False
        else:
            self.share([number])
            self.release([table[i]])
            table[i] = number
        return True
        # end exercise 05.5

    def discard(self, table: Sequence[int]) -> None:
        """Never match these blocks again, nor what was computed from them (their content turned out to be wrong)."""
        children: dict[int, list[int]] = {}
        for number, block in enumerate(self.blocks):
            children.setdefault(block.parent, []).append(number)
        doomed = list(table)
        while doomed:
            number = doomed.pop()
            doomed += children.pop(number, [])
            self._forget(number)

    def _forget(self, number: int) -> None:
        """Drop a block's digest before it gets new content."""
        block = self.blocks[number]
        if block.digest is not None:
            del self.published[block.digest]
            block.digest, block.tokens, block.parent = None, (), ROOT

    # ---- proof

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Recount everything from the tables of all live requests. Raises AssertionError that says what is wrong."""

        def require(condition: bool, message: str) -> None:
            if not condition:
                raise AssertionError(message)

        counts = Counter(number for table in tables for number in table)
        for number, block in enumerate(self.blocks):
            require(block.refs == counts[number], f"block {number}: {block.refs} refs, {counts[number]} users")
            require((block.refs == 0) == (number in self.free), f"block {number}: free and used, or neither")
            if block.digest is None:
                continue
            require(self.published.get(block.digest) == number, f"block {number}: digest does not lead to it")
            parent = self.blocks[block.parent] if block.parent != ROOT else None
            require(parent is None or parent.digest is not None, f"block {number}: its parent was evicted first")
            before = (parent.digest or b"") if parent else b""
            require(self.hash_fn(before, block.tokens) == block.digest, f"block {number}: digest is not its tokens'")
        require(len(self.published) == sum(b.digest is not None for b in self.blocks), "a digest leads to a lost block")
