"""The race detector against a plain oracle, which keeps all accesses; happens-before is reachability in a graph.

A program is a list of steps of a few CTAs, in the order in which they run. The detector raises at the first step that
races; so does the oracle, which knows neither clocks nor units.
"""

import contextlib
import random
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mkernel as mk
from mkernel.sim import shadow
from mkernel.sim.memory import DESCRIPTOR, MULTICAST, PLAIN, Memory
from mkernel.sim.order import NOTHING, joined
from mkernel.sim.races import Races

CTAS = 3
WORDS = 2  # that synchronise, behind the data
DATA = 24  # bytes


class Machine:
    """The detector, told what the interpreter would tell it."""

    def __init__(self):
        self.bytes = np.zeros(DATA + 8 * WORDS, dtype=np.uint8)
        self.races = Races()
        self.memory = Memory(random.Random(0), self.races)
        self.start = self.bytes.ctypes.data
        self.memory.add(self.start, self.bytes.size)
        self.ctas = [self.races.cta(number, f"CTA {number}", NOTHING) for number in range(CTAS)]

    def addresses(self, places):
        return np.array([self.start + place for place in places], dtype=np.uint64)

    def load(self, cta, path, size, places):
        dtype = np.dtype(f"u{size}")
        everything = np.ones(len(places), dtype=bool)
        self.memory.load(self.ctas[cta], self.addresses(places), everything, np.zeros((), dtype), dtype, path)

    def store(self, cta, path, size, places):
        values = np.zeros(len(places), dtype=f"u{size}")
        self.memory.store(self.ctas[cta], self.addresses(places), values, np.ones(len(places), dtype=bool), path)

    def atomic(self, cta, place, size, change):
        """A relaxed one, on data."""
        self.memory.atomic(self.ctas[cta], self.addresses([place]), size, change)

    def word(self, cta, words, change, acquire, release, expected):
        """An atomic operation on words that synchronise: `change` is what becomes of a value. expected: of a wait."""
        order = self.ctas[cta]
        places = [DATA + 8 * word for word in words]
        addresses = self.addresses(places)
        self.memory.atomic(order, addresses, 8, change is not None)
        before = [int(self.bytes[place : place + 8].view(np.int64)[0]) for place in places]
        after = [change(value) if change is not None else value for value in before]
        for place, value in zip(places, after):
            self.bytes[place : place + 8].view(np.int64)[0] = value
        if acquire:
            for word, old, value in zip(addresses.tolist(), before, after):
                order.acquired(word, self.races.clock_of(word), by_all=len(words) == 1, value=max(old, value))
        if release:
            clock = order.released()
            for word, old, value in zip(addresses.tolist(), before, after):
                self.races.release(order.main, clock, word, old, value)
        if expected is not None:
            self.races.waited(order, addresses.tolist(), [expected] * len(words), len(words) == 1, late=False)

    def barrier(self, cta):
        self.ctas[cta].barrier()

    def complete(self, cta):
        self.ctas[cta].complete_descriptors()

    def fence(self, cta, path):
        self.ctas[cta].fence_descriptors() if path == DESCRIPTOR else self.ctas[cta].fence_multicast()

    def next_launch(self):
        """All CTAs end; those of the next launch know what they did."""
        known = NOTHING
        for cta in self.ctas:
            known = joined(known, cta.ended())
        self.ctas = [self.races.cta(number, f"CTA {number}", known) for number in range(CTAS)]


class Raced(Exception):
    pass


class Oracle:
    """Nodes of a graph, each with the set of all nodes that lead to it, as the bits of a number."""

    def __init__(self):
        self.numbers = count()
        self.accesses = []  # (node, CTA, path, is atomic, stores, bytes)
        self.values = [0] * WORDS
        self.words = [0] * WORDS  # what was released to each
        self.history = [
            [(0, 0)] for _ in range(WORDS)
        ]  # values since it was last made smaller, and what was known then
        self.begin(0)

    def begin(self, known):
        each = range(CTAS)
        self.known = [known for _ in each]  # from others, and of other paths
        self.own = [known for _ in each]  # what the CTA itself did, the plain way
        self.atomics = [0 for _ in each]  # its atomic operations
        self.covered = [known for _ in each]  # what a release speaks for
        self.for_barrier = [0 for _ in each]  # each thread knows for itself
        self.path_did = {path: [0 for _ in each] for path in (DESCRIPTOR, MULTICAST)}
        self.path_knows = {path: [known for _ in each] for path in (DESCRIPTOR, MULTICAST)}
        self.path_done = {path: [0 for _ in each] for path in (DESCRIPTOR, MULTICAST)}

    def knows(self, cta):
        others = self.path_done[DESCRIPTOR][cta] | self.path_done[MULTICAST][cta]
        return self.known[cta] | self.own[cta] | self.atomics[cta] | others

    def access(self, cta, path, atomic, stores, touched):
        before = self.knows(cta) if path == PLAIN else self.path_knows[path][cta] | self.path_did[path][cta]
        for node, whose, it_was_atomic, it_stored, bytes_of in self.accesses:
            conflict = (stores or it_stored) and not (atomic and it_was_atomic) and touched & bytes_of
            if conflict and whose == cta and stores and not it_stored and not it_was_atomic:
                continue  # it has what it loaded
            if conflict and not before >> node & 1:
                raise Raced
        node = next(self.numbers)
        self.accesses.append((node, cta, atomic, stores, touched))
        reached = 1 << node
        if atomic:
            self.atomics[cta] |= reached
        elif path == PLAIN or not stores:
            self.own[cta] |= reached
        else:
            self.path_did[path][cta] |= reached

    def load(self, cta, path, size, places):
        self.access(cta, path, False, False, {place + i for place in places for i in range(size)})

    def store(self, cta, path, size, places):
        self.access(cta, path, False, True, {place + i for place in places for i in range(size)})

    def atomic(self, cta, place, size, change):
        self.access(cta, PLAIN, True, change, set(range(place, place + size)))

    def word(self, cta, words, change, acquire, release, expected):
        touched = {DATA + 8 * word + i for word in words for i in range(8)}
        self.access(cta, PLAIN, True, change is not None, touched)
        learned = 0
        for word in words:
            learned |= self.words[word] if expected is None else self.first_reached(word, expected)
        if acquire and (len(words) == 1 or expected is None):  # many words without a wait: see Cta
            self.known[cta] |= learned
        elif acquire:
            self.for_barrier[cta] |= learned
        told = self.known[cta] | self.covered[cta] | self.atomics[cta]
        for word in words:
            if release:
                self.words[word] |= told
            if change is not None:
                value = change(self.values[word])
                if value < self.values[word]:
                    self.history[word] = []
                self.history[word].append((value, self.words[word]))
                self.values[word] = value
            elif release:  # of the value that is there
                self.history[word].append((self.values[word], self.words[word]))

    def first_reached(self, word, expected):
        return next(known for value, known in self.history[word] if value >= expected)

    def barrier(self, cta):
        self.known[cta] |= self.for_barrier[cta]
        self.for_barrier[cta] = 0
        self.covered[cta] |= self.knows(cta)

    def complete(self, cta):
        self.path_done[DESCRIPTOR][cta] |= self.path_did[DESCRIPTOR][cta]

    def fence(self, cta, path):
        if path == MULTICAST:
            self.path_done[MULTICAST][cta] |= self.path_did[MULTICAST][cta]
        self.path_knows[path][cta] |= self.knows(cta)

    def next_launch(self):
        everything = (1 << next(self.numbers)) - 1
        self.begin(everything)


def add(value):
    return value + 1


def reset(value):
    return 0


CTA = st.integers(0, CTAS - 1)
PATHS = st.sampled_from([PLAIN, PLAIN, PLAIN, DESCRIPTOR, MULTICAST])


@st.composite
def blocks(draw):
    """An element size, and where the elements are: ranges, strided, scattered, twice the same, not aligned."""
    size = draw(st.sampled_from([1, 2, 4, 8]))
    limit = DATA - size
    how = draw(st.sampled_from(["range", "range", "strided", "scattered", "odd"]))
    if how == "scattered":
        places = draw(st.lists(st.integers(0, limit // size), min_size=1, max_size=4))
        return size, tuple(place * size for place in places)
    if how == "odd":
        return size, tuple(draw(st.lists(st.integers(0, limit), min_size=1, max_size=3)))
    first, step = draw(st.integers(0, limit // size)) * size, size * (1 if how == "range" else draw(st.integers(2, 3)))
    return size, tuple(range(first, min(first + step * draw(st.integers(1, 4)), limit + 1), step))


ATOMIC_SIZES = st.sampled_from([4, 8])
WORD = st.integers(0, WORDS - 1).map(lambda word: (word,))
STEPS = st.one_of(
    st.tuples(st.just("load"), CTA, PATHS, blocks()),
    st.tuples(st.just("store"), CTA, PATHS, blocks()),
    st.tuples(st.just("atomic"), CTA, st.integers(0, DATA // 8 - 1), ATOMIC_SIZES, st.booleans()),
    st.tuples(st.just("notify"), CTA, WORD),
    st.tuples(st.just("wait"), CTA, st.one_of(WORD, st.just(tuple(range(WORDS)))), st.integers(1, 3)),
    st.tuples(st.just("word"), CTA, WORD, st.sampled_from([add, add, reset, None]), st.booleans(), st.booleans()),
    st.tuples(st.just("words"), CTA, st.sampled_from([add, None]), st.booleans(), st.booleans()),
    st.tuples(st.just("barrier"), CTA),
    st.tuples(st.just("complete"), CTA),
    st.tuples(st.just("fence"), CTA, st.sampled_from([DESCRIPTOR, MULTICAST])),
    st.tuples(st.just("plain word"), CTA, st.integers(0, WORDS - 1), st.booleans()),
    st.tuples(st.just("launch")),
)


@st.composite
def messages(draw):
    """One CTA touches something, tells another, and that one touches the same: each part of it may be missing."""
    sender, receiver = draw(st.permutations(range(CTAS)))[:2]
    block = draw(blocks())
    first, second = draw(st.sampled_from([("store", "load"), ("store", "store"), ("load", "store")]))
    path, back = draw(PATHS), draw(PATHS)
    words = draw(st.one_of(WORD, WORD, st.just(tuple(range(WORDS)))))
    told = [("word", sender, (word,), add, draw(st.booleans()), draw(MOSTLY)) for word in words]
    how = draw(st.sampled_from(["wait", "wait", "poll", "reset"]))
    if how == "wait":
        heard = ("wait", receiver, words, draw(st.integers(1, 3)))
    elif len(words) == 1:
        heard = ("word", receiver, words, reset if how == "reset" else None, draw(MOSTLY), draw(st.booleans()))
    else:
        heard = ("words", receiver, None, draw(MOSTLY), draw(st.booleans()))
    steps = [
        (True, (first, sender, path, block)),
        (path == DESCRIPTOR, ("complete", sender)),
        (path == MULTICAST, ("fence", sender, MULTICAST)),
        (True, ("barrier", sender)),
        *((True, step) for step in told),
        (True, heard),
        (len(words) > 1, ("barrier", receiver)),
        (back != PLAIN, ("fence", receiver, back)),
        (True, (second, receiver, back, block)),
    ]
    return [step for needed, step in steps if needed and draw(MOSTLY)]


MOSTLY = st.integers(0, 7).map(bool)
PROGRAMS = st.lists(st.one_of(STEPS.map(lambda step: [step]), messages()), min_size=1, max_size=10).map(
    lambda parts: [step for part in parts for step in part]
)


def take(machine, values, step):
    """One step. values: of the words, so that nobody waits for what is not there."""
    name, *rest = step
    if name in ("load", "store"):
        cta, path, (size, places) = rest
        getattr(machine, name)(cta, path, size, places)
    elif name == "atomic":
        cta, place, size, change = rest
        machine.atomic(cta, 8 * place, size, change)
    elif name == "notify":
        cta, words = rest
        machine.barrier(cta)
        machine.word(cta, words, add, False, True, None)
    elif name == "wait":
        cta, words, expected = rest
        if all(values[word] >= expected for word in words):
            machine.word(cta, words, None, True, False, expected)
    elif name in ("word", "words"):
        cta, words = (rest[0], rest.pop(1)) if name == "word" else (rest[0], tuple(range(WORDS)))
        machine.word(cta, words, *rest[1:], None)
    elif name == "plain word":
        cta, word, stores = rest
        (machine.store if stores else machine.load)(cta, PLAIN, 8, (DATA + 8 * word,))
    elif name == "launch":
        machine.next_launch()
    else:
        getattr(machine, name)(*rest)


def found_at(program):
    """The step at which the detector raises, if it does."""
    machine, values = Machine(), Oracle()
    for number, step in enumerate(program):
        try:
            take(machine, values.values, step)
        except mk.RaceError:
            return number
        with contextlib.suppress(Raced):
            take(values, values.values, step)
    return None


@pytest.fixture(scope="module", params=[2, shadow.LOADS], ids=["loads summed up at once", "loads kept"])
def loads(request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shadow, "LOADS", request.param)
        yield


@settings(max_examples=600, deadline=None, derandomize=True)
@given(steps=PROGRAMS, chosen=st.integers(0, 20))
@pytest.mark.thorough
def test_the_detector_and_the_oracle_agree(loads, steps, chosen):
    """Steps that race are left out, so that programs get long. Some are tried, each behind what was left before it."""
    oracle, ordered, racing = Oracle(), [], []
    for step in steps:
        try:
            take(oracle, oracle.values, step)
            ordered.append(step)
        except Raced:
            racing.append([*ordered, step])
    assert found_at(ordered) is None
    if racing:
        for program in (racing[chosen % len(racing)], racing[-1]):
            assert found_at(program) == len(program) - 1


def tells(cta, word=0, release=True):
    return ("word", cta, (word,), add, False, release)


def polls(cta, word=0, change=None):
    return ("word", cta, (word,), change, True, False)


def access(what, cta, size, *places, path=PLAIN):
    return (what, cta, path, (size, places))


BY_HAND = {
    "a descriptor needs a fence behind a poll": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), polls(1), access("load", 1, 8, 0, path=DESCRIPTOR)], True,
    ),
    "and then it knows": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), polls(1), ("fence", 1, DESCRIPTOR),
         access("load", 1, 8, 0, path=DESCRIPTOR)], False,
    ),
    "a value that nobody has released": (
        [tells(0), tells(1, release=False), access("store", 2, 8, 0), ("barrier", 2), tells(2), ("wait", 1, (0,), 2),
         access("load", 1, 8, 0)], True,
    ),
    "a signal that was reset without a release": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), ("wait", 1, (0,), 1), access("load", 1, 8, 0),
         ("word", 1, (0,), reset, False, False), access("store", 2, 8, 8), ("barrier", 2), tells(2),
         ("wait", 1, (0,), 1), access("load", 1, 8, 8)], False,
    ),
    "a signal that was reset below what it had before its first release": (
        [tells(1, release=False), tells(1), ("word", 1, (0,), reset, False, False), access("store", 0, 8, 0),
         ("barrier", 0), tells(0), ("wait", 1, (0,), 1), access("load", 1, 8, 0)], False,
    ),
    "an element twice, and one that is left out": ([access("load", 0, 8, 0, 0, 16), access("store", 1, 8, 8)], False),
    "a store through a descriptor that was completed behind the barrier": (
        [access("store", 0, 8, 0, path=DESCRIPTOR), ("barrier", 0), ("complete", 0), tells(0), ("wait", 1, (0,), 1),
         access("load", 1, 8, 0)], True,
    ),
    "smaller units when loads were summed up": (
        [access("load", 0, 8, 0), access("load", 0, 8, 16), access("load", 0, 8, 16), access("store", 1, 1, 15),
         access("store", 1, 1, 17)], True,
    ),
    "the last one to arrive resets the counter by a plain store": (
        [("word", 0, (0,), add, True, True), ("word", 1, (0,), add, True, True), ("plain word", 1, 0, True)], False,
    ),
    "a plain reset by one that has not acquired": (
        [("word", 0, (0,), add, True, True), ("word", 1, (0,), add, False, True), ("plain word", 1, 0, True)], True,
    ),
    "many words need a barrier": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), tells(0, 1), ("wait", 1, (0, 1), 1),
         access("load", 1, 8, 0)], True,
    ),
    "many words, and the barrier": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), tells(0, 1), ("wait", 1, (0, 1), 1), ("barrier", 1),
         access("load", 1, 8, 0)], False,
    ),
    "a release without a barrier speaks for earlier launches": (
        [access("store", 0, 8, 0, path=DESCRIPTOR), ("launch",), tells(0), ("wait", 1, (0,), 1),
         access("load", 1, 8, 0)], False,
    ),
    "over three CTAs": (
        [access("store", 0, 8, 0), ("barrier", 0), tells(0), polls(1), tells(1, 1), polls(2, 1),
         access("store", 2, 8, 0)], False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(loads, name):
    """What random programs find rarely."""
    program, last_races = BY_HAND[name]
    oracle = Oracle()
    for step in program[:-1]:
        take(oracle, oracle.values, step)
    with pytest.raises(Raced) if last_races else contextlib.nullcontext():
        take(oracle, oracle.values, program[-1])
    assert found_at(program) == (len(program) - 1 if last_races else None)


def test_a_wait_for_an_old_value_guarantees_no_more_when_many_have_followed():
    """However far the signal has gone since."""
    ahead = [step for place in range(40) for step in (access("store", 0, 1, place % DATA), ("barrier", 0), tells(0))]
    assert found_at([*ahead, ("wait", 1, (0,), 21), access("load", 1, 1, 20)]) is None
    program = [*ahead, ("wait", 1, (0,), 20), access("load", 1, 1, 20)]
    assert found_at(program) == len(program) - 1
