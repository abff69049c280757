"""Sequences at an engine with its cache in one memory or two, and random work for it: joins, chunks, second batches,
rows that park, join, stay and are canceled, moves between the memories, forks.
"""

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from deployments.generation.scheduler.block_pool import BLOCK, Blocks, NoBlocks
from deployments.generation.scheduler.work import Chunk, Copy, Work

MOST = 6  # sequences at once
FIRST, SECOND, PARKING = "first", "second", "parking"
KINDS = {"join": 5, "step": 30, "leave": 2, "move": 3, "fork": 2}  # how often


def some_events(seed, count):
    """Random events: (kind, which sequence or what length, {index: (tokens, role)} of a step, flag). The flag: whether
    it is on the host; in a step, whether parked rows join.
    """
    random = np.random.default_rng(seed)
    shares = np.array(list(KINDS.values())) / sum(KINDS.values())
    for what in random.choice(list(KINDS), count, p=shares).tolist():
        length = int(random.integers(1, 200 if random.random() < 0.2 else 12))
        places = np.flatnonzero(random.random(MOST) < 0.8).tolist()
        roles = random.choice([FIRST, SECOND, PARKING], MOST)  # of a host's row; all others are of the first batch
        tokens = random.integers(1, 60, MOST).tolist()
        yield what, length, {at: (tokens[at], roles[at]) for at in places}, bool(random.random() < 0.6)


EVENTS = st.builds(some_events, st.integers(0, 2**32), st.integers(10, 200))


@dataclass
class Sequence:
    ids: list[int]
    prompt: int
    on_host: bool
    computed: int = 0
    table: list[int] = field(default_factory=list)
    parked: int | None = None  # its number


class World:
    """`pick`: draws a token from logits. `layers`: most steps that a row is parked."""

    def __init__(self, steps, blocks, num_cpu_blocks, block_size=BLOCK):
        self.steps, self.block_size = steps, block_size
        self.rooms = {False: Blocks(blocks, block_size), True: Blocks(num_cpu_blocks, block_size)}
        self.has_host = num_cpu_blocks > 0
        self.at, self.copies, self.called_off, self.numbers = {}, [], [], 0

    def join(self, name, prompt, on_host=False):
        self.at[name] = Sequence(list(prompt), len(prompt), on_host and self.has_host)

    def leave(self, name):
        """Remove a sequence; returns (all tokens, length of the prompt). Others may use its blocks in the next step."""
        one = self.at.pop(name)
        if one.parked is not None:
            self.called_off.append(one.parked)
        self.rooms[one.on_host].give_back(one.table)
        return one.ids, one.prompt

    def move(self, name):
        """Move a sequence to the other memory before the next step. Raises NoBlocks."""
        one, table = self.at[name], []
        self.rooms[not one.on_host].grow(table, one.computed)
        pairs = zip(one.table, table, strict=False)
        self.copies += [Copy(source, target, one.on_host, not one.on_host) for source, target in pairs]
        self.rooms[one.on_host].give_back(one.table)
        one.table, one.on_host = table, not one.on_host

    def fork(self, name, new, token):
        """Start another sequence with the tokens of this one and `token`. Raises NoBlocks."""
        one = self.at[name]
        room = self.rooms[one.on_host]
        table = room.share(one.table, one.computed)
        try:
            room.grow(table, one.computed)
        except NoBlocks:
            room.give_back(table)
            raise
        if one.computed % self.block_size:
            last = one.computed // self.block_size
            self.copies.append(Copy(one.table[last], table[last], one.on_host, one.on_host))
        ids = [*one.ids[: one.computed], token]
        self.at[new] = Sequence(ids, len(ids), one.on_host, one.computed, table)

    def free(self):
        """The sequences that are not parked."""
        return sorted(name for name, one in self.at.items() if one.parked is None)

    def step(self, shares, *, joins=False):
        """Run a step. `shares`: {name: (how many of its remaining tokens, its role)}. Returns the results. Raises
        NoBlocks.
        """
        ends = {
            name: min(len(self.at[name].ids), self.at[name].computed + max(1, share))
            for name, (share, _) in shares.items()
        }
        for name, end in ends.items():
            self.rooms[self.at[name].on_host].grow(self.at[name].table, end)
        named = {FIRST: [], SECOND: [], PARKING: []}
        chunks = {}
        for name, end in ends.items():
            one = self.at[name]
            chunk = Chunk(
                np.array(one.ids[one.computed : end], np.int32),
                one.computed,
                tuple(one.table),
                wanted=end == len(one.ids),
                on_host=one.on_host,
            )
            role = shares[name][1] if one.on_host and len(chunk.ids) == 1 else FIRST
            role = FIRST if role == PARKING and not chunk.wanted else role
            named[role].append(name)
            chunks[name], one.computed = chunk, end
        for name in named[PARKING]:
            self.numbers += 1
            self.at[name].parked = self.numbers
        work = Work(
            [chunks[name] for name in named[FIRST]],
            self.copies,
            [chunks[name] for name in named[SECOND]],
            [(self.at[name].parked, chunks[name]) for name in named[PARKING]],
            self.called_off,
            joins,
        )
        self.copies, self.called_off = [], []
        return self.take(work, [name for name in named[FIRST] + named[SECOND] if chunks[name].wanted])

    def take(self, work, wanted):
        computed = self.steps.step(work)
        logits = getattr(computed.logits, "logits", computed.logits)
        by_number = {one.parked: name for name, one in self.at.items() if one.parked is not None}
        arrived = [by_number[number] for number in computed.arrived]
        for name, numbers in zip([*wanted, *arrived], logits, strict=True):
            self.at[name].ids.append(int(numbers.argmax()))
        for name in arrived:
            self.at[name].parked = None
        return computed

    def run(self, events, prompt_of):
        """Run the events; yields (all tokens, length of the prompt) of each sequence that leaves."""
        joined = 0
        for what, number, shares, flag in events:
            free = self.free()
            name = free[number % len(free)] if free else None
            try:
                if what == "join" and len(self.at) < MOST:
                    joined += 1
                    self.join(joined, prompt_of(number, joined), flag)
                elif what == "leave" and self.at:  # parked or not
                    yield self.leave(sorted(self.at)[number % len(self.at)])
                elif what == "move" and name is not None and self.has_host:
                    self.move(name)
                elif what == "fork" and name is not None and len(self.at) < MOST:
                    joined += 1
                    self.fork(name, joined, 5 + number % 90)
                elif what == "step":
                    some = {of: shares[at] for at, of in enumerate(free) if at in shares}
                    if some or (flag and self.has_host):
                        self.step(some, joins=flag)
            except NoBlocks:
                yield self.leave(max(self.at))
        yield from self.end()

    def end(self):
        """Finish and remove all sequences."""
        for _ in range(self.steps.layers * MOST):
            if any(one.parked is not None for one in self.at.values()):
                self.step({}, joins=True)
        for name in list(self.at):
            assert self.at[name].parked is None
            yield self.leave(name)
        for room in self.rooms.values():
            assert room.free == room.count
