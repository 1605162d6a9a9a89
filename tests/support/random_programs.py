"""Random programs: groups that come and go, calls on them with float64 as the oracle, and mistakes.

A seed decides everything: the cluster, the groups, the calls and their order. All ranks draw the same program, and each
carries out what concerns it. A failure names the seed and the step. To replay it:

    MKERNEL_TEST_SEED=17 pytest tests/ops/test_random_groups.py tests/cluster/test_random_process_groups.py
"""

from __future__ import annotations

import hashlib
import os
import random
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

import mkernel as mk
from support import attention_reference, moe_reference, operator_calls, reduce_reference

SEED = "MKERNEL_TEST_SEED"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


def seeds(usual):
    """The seed that was asked for, or the usual ones."""
    return [int(os.environ[SEED])] if SEED in os.environ else list(usual)


# -- calls: `start` makes the call, `check` looks at what it gave when it is done


@dataclass(frozen=True)
class Gather:
    case: operator_calls.Case
    turn: int
    layouts: tuple[str, ...]
    config: mk.Config
    gathered: bool
    in_heap: bool

    @staticmethod
    def draw(rng, size, turn):
        n = tuple(rng.randint(0, 40) for _ in range(size))
        case = operator_calls.Case(rng.randint(1, 40), n, rng.randint(1, 40), rng.choice(DTYPES))
        config = mk.Config(chunk_rows=rng.choice([None, 1, 3, 16, 40]), tile_m=16, tile_n=rng.choice([16, 32]))
        layouts = tuple(rng.choice(list(operator_calls.LAYOUTS)) for _ in range(3))
        return Gather(case, turn, layouts, config, rng.random() < 0.3, rng.random() < 0.2)

    def larger(self):
        return replace(self, case=replace(self.case, m=self.case.m + 1))

    @property
    def agreed(self):
        """Calls in which this differs are different calls to the ranks. (They may be in more than this.)"""
        return self.case.m, self.case.k, self.case.dtype

    def start(self, group, **wrong):
        case, rank = self.case, group.rank
        a = operator_calls.lay_out(case.rows(rank, self.turn), self.layouts[0])
        if self.in_heap and not wrong:
            a = mk.empty(case.m, case.k, dtype=case.dtype, group=group).copy_(a)
        b = operator_calls.lay_out(case.weights(rank, self.turn), self.layouts[1])
        canary = operator_calls.Canary(group.size * case.m, case.columns(rank), case.dtype, self.layouts[2])
        canary.tensor.fill_(NAN)
        given = dict(a=a, b=b, out=canary.tensor, config=self.config, return_gathered=self.gathered) | wrong
        result = mk.all_gather_matmul(given.pop("a"), given.pop("b"), group=group, **given)
        return a, b, canary, result

    def check(self, group, made):
        a, b, canary, result = made
        everyone = self.case.gathered(group.size, self.turn)
        operator_calls.assert_same(a, self.case.rows(group.rank, self.turn))
        operator_calls.assert_product(canary.tensor, everyone, b)
        canary.check()
        if self.gathered:
            operator_calls.assert_same(result[1], everyone)


@dataclass(frozen=True)
class Reduce:
    way: str
    case: reduce_reference.Sum
    turn: int
    layouts: tuple[str, ...]
    config: mk.Config
    bias: bool
    residual: bool
    reduce_dtype: torch.dtype | None

    @staticmethod
    def draw(rng, size, turn):
        way = rng.choice(["matmul_reduce_scatter", "matmul_all_reduce"])
        m = rng.randint(1, 10) * size if way == "matmul_reduce_scatter" else rng.randint(1, 40)
        case = reduce_reference.Sum(
            m, rng.randint(1, 40), tuple(rng.randint(1, 40) for _ in range(size)), rng.choice(DTYPES)
        )
        config = mk.Config(tile_m=16, tile_n=rng.choice([16, 32]), tile_k=rng.choice([16, 32]))
        layouts = tuple(rng.choice(list(operator_calls.LAYOUTS)) for _ in range(3))
        bias, residual = rng.random() < 0.5, rng.random() < 0.5
        return Reduce(way, case, turn, layouts, config, bias, residual, rng.choice([None, torch.float32]))

    def larger(self):
        return replace(self, case=replace(self.case, m=self.case.m + 1))

    @property
    def agreed(self):
        return self.way, self.case.m, self.case.n, self.case.dtype

    def start(self, group, **wrong):
        case, rank = self.case, group.rank
        rows = case.m if self.way == "matmul_all_reduce" else case.m // group.size
        canary = operator_calls.Canary(rows, case.n, case.dtype, self.layouts[2])
        canary.tensor.fill_(NAN)
        given = dict(a=operator_calls.lay_out(case.a(rank, self.turn), self.layouts[0]), out=canary.tensor,
                     b=operator_calls.lay_out(case.b(rank, self.turn), self.layouts[1]), config=self.config,
                     reduce_dtype=self.reduce_dtype)  # fmt: skip
        if self.bias:
            given["bias"] = case.bias(self.turn)
        if self.residual:
            given["residual"] = reduce_reference.mine(group, self.way, case.residual(self.turn)).clone()
        given |= wrong
        reduce_reference.op_of(self.way)(given.pop("a"), given.pop("b"), group=group, **given)
        return given, canary

    def check(self, group, made):
        _, canary = made
        reduce_reference.check(
            group, self.way, self.case, canary.tensor, self.turn, bias=self.bias, residual=self.residual,
            reduce_dtype=self.reduce_dtype,
        )  # fmt: skip
        canary.check()
        if self.way == "matmul_all_reduce":
            return hashlib.sha256(operator_calls.bits(canary.tensor).numpy().tobytes()).hexdigest()[:16]


@dataclass(frozen=True)
class Attention:
    case: attention_reference.Case
    turn: int

    @staticmethod
    def draw(rng, size, turn):
        length, kv_heads = 2 * rng.randint(1, 12), rng.randint(1, 2)
        documents = None
        if rng.random() < 0.3:
            inner = rng.sample(range(1, size * length), min(rng.randint(0, 3), size * length - 1))
            documents = (0, *sorted(inner), size * length)
        case = attention_reference.Case(
            length, kv_heads * rng.randint(1, 2), kv_heads, dtype=rng.choice(DTYPES), causal=rng.random() < 0.5,
            layout=rng.choice(["contiguous", "zigzag"]), documents=documents,
        )  # fmt: skip
        return Attention(case, turn)

    def larger(self):
        return replace(self, case=replace(self.case, length=self.case.length + 2, documents=None))

    @property
    def agreed(self):
        return self.case

    def start(self, group, **wrong):
        tensors = dict(zip("qkv", (self.case.part(name, group.rank, self.turn) for name in ("query", "key", "value"))))
        out = torch.full_like(tensors["q"], NAN)
        given = tensors | dict(out=out, return_lse=True) | self.case.arguments() | wrong
        if "a" in given:
            given["q"] = given.pop("a")
        return tensors, mk.ring_attention(given.pop("q"), given.pop("k"), given.pop("v"), group=group, **given)

    def check(self, group, made):
        _, (out, lse) = made
        attention_reference.assert_attention(
            out, lse, attention_reference.exact(self.case, group.rank, group.size, self.turn), self.case
        )


@dataclass(frozen=True)
class Experts:
    which: str  # dispatch, combine (after a dispatch) or ffn
    layer: moe_reference.Layer
    turn: int
    max_tokens: int | None

    @staticmethod
    def draw(rng, size, turn):
        tokens = tuple(rng.choice([0, 1, rng.randint(2, 20)]) for _ in range(size))
        counts = tuple(rng.randint(0, 3) for _ in range(size))
        layer = moe_reference.Layer(
            tokens, counts, k=rng.randint(1, 4), hidden=rng.choice([16, 24, 33]), out=rng.choice([8, 20]),
            dtype=rng.choice(DTYPES),
            routing=rng.choice(["random", "zipf", "one", "twice", "none"] if sum(counts) else ["none"]),
        )  # fmt: skip
        most = rng.choice([None, max(tokens) + rng.randint(0, 5)])
        return Experts(rng.choice(["dispatch", "combine", "ffn"]), layer, turn, most)

    def larger(self):
        return replace(self, layer=replace(self.layer, hidden=self.layer.hidden + 1))

    @property
    def agreed(self):
        return self.which == "ffn", self.layer.hidden, self.layer.k, self.layer.dtype

    def start(self, group, combine=None, **wrong):
        layer, rank, turn = self.layer, group.rank, self.turn
        given = dict(
            a=layer.x(rank, turn), ids=layer.ids(rank, turn), max_tokens=self.max_tokens, config=moe_reference.SMALL
        )
        weights = layer.weights(rank, turn)
        if self.which == "ffn":
            out = torch.full((layer.tokens[rank], layer.hidden), NAN, dtype=layer.dtype)
            given = dict(given, w=layer.gate_up(rank, turn), out=out) | wrong
            tensors = [given.pop(name) for name in ("a", "ids")]
            matrices = [given.pop("w"), layer.down(rank, turn)]
            return tensors, weights, matrices, mk.moe_ffn(*tensors, weights, *matrices, group=group, **given)
        given = dict(given, w=layer.w(rank, turn)) | wrong
        tensors = [given.pop(name) for name in ("a", "ids", "w")]
        y, handle = mk.moe_dispatch_matmul(*tensors, group=group, **given)
        z = None
        if combine is not None:
            combine(group, y, handle, weights)
        elif self.which == "combine":
            z = mk.moe_combine(y, handle, weights, group=group)
        return tensors, y, handle, weights, z

    def check(self, group, made):
        layer, rank, turn = self.layer, group.rank, self.turn
        if self.which == "ffn":
            if layer.tokens[rank]:
                moe_reference.assert_sum(made[-1], *layer.ffn(rank, turn), layer.hidden + layer.out)
            return
        _, y, handle, _, z = made
        moe_reference.check_dispatch(layer, rank, y, handle, turn)
        if z is not None and layer.tokens[rank]:
            moe_reference.assert_sum(z, *layer.combined(rank, turn), layer.hidden)

    def misrouted(self, rng):
        """A call that every rank refuses in its kernel, and the error."""
        if not any(self.layer.tokens):
            return None
        layer = replace(self.layer, routing="same")
        which = "ffn" if self.which == "ffn" else "dispatch"  # a dispatch that fails has no rows to combine
        wrong = rng.choice([rank for rank, count in enumerate(layer.tokens) if count])
        if rng.random() < 0.5 or not layer.all_experts:
            beyond = torch.full((layer.tokens[wrong], layer.k), layer.all_experts)
            return replace(self, layer=layer, which=which), wrong, dict(ids=beyond), mk.RoutingError
        expert = self.turn % layer.all_experts  # gets all rows
        owner = next(rank for rank in range(layer.size) if expert < layer.first(rank) + layer.experts[rank])
        too_few = sum(layer.tokens) * layer.k - 1
        return replace(self, layer=layer, which=which), owner, dict(capacity=too_few), mk.CapacityError


CALLS = [Gather, Reduce, Attention, Experts]
RESIDENT = [Gather, Reduce, Attention]  # work with any number of resident CTAs; a mixture of experts needs them all


# -- mistakes

WRONG = [
    dict(a="rows"),
    dict(a=torch.ones(3)),
    dict(config=mk.Config(tile_m=17)),
    dict(config=mk.Config(ctas=10**5)),
    dict(config="fast"),
    dict(out=torch.ones(1, 1)),
    dict(max_tokens=-1),
]


def draw_mistake(rng, good, size, turn, known, calls):
    """(name, what the ranks that are mistaken do instead of the good call)."""
    kind = rng.choice(["larger", "known", "operator", "refused", "barrier", "empty", "split", "combine"])
    if kind == "larger":
        return kind, good.larger().start
    if kind == "combine" and isinstance(good, Experts) and good.which == "combine":
        instead = rng.choice(sorted(INSTEAD_OF_COMBINE))
        return f"combine: {instead}", lambda group: good.start(group, combine=INSTEAD_OF_COMBINE[instead])
    others = [other for other in known if other.agreed != good.agreed]
    if kind == "known" and others:
        other = replace(rng.choice(others), turn=turn)
        return f"{kind}: {other}", plain(other).start
    if kind in ("known", "operator", "combine"):
        other = rng.choice([call for call in calls if not isinstance(good, call)]).draw(rng, size, turn)
        return f"operator: {other}", plain(other).start
    if kind == "refused":
        wrong = rng.choice(WRONG[:5] if isinstance(good, Experts) else WRONG[:-1])
        return kind, lambda group: good.start(group, **wrong)
    if kind == "barrier":
        return kind, lambda group: group.barrier()
    if kind == "empty":
        return kind, lambda group: mk.empty(7, 3, group=group)
    return kind, lambda group: group.split(0)


INSTEAD_OF_COMBINE = {
    "fewer columns": lambda group, y, handle, weights: mk.moe_combine(y[:, :-1], handle, weights, group=group),
    "refused": lambda group, y, handle, weights: mk.moe_combine(y, handle, "weights", group=group),
    "barrier": lambda group, y, handle, weights: group.barrier(),
}


def plain(call):
    """The call without an allocation in front, which would be another call."""
    return replace(call, in_heap=False) if isinstance(call, Gather) else call


# -- programs


@dataclass
class Entry:
    """A group of the program; `group` is None on ranks that are not in it."""

    members: tuple[int, ...]
    group: mk.Group | None
    known: list  # calls that were made on it
    name: str


class Program:
    """One rank's view of a random program. `make_more(rng, entries)`: other ways to make groups than from a group."""

    def __init__(self, whole, seed, steps, make_more=None, calls=CALLS):
        self.rng = random.Random(seed)
        self.seed, self.steps, self.make_more, self.calls = seed, steps, make_more, calls
        self.rank, self.world = whole.rank, whole.world
        self.entries = [Entry(tuple(range(whole.size)), whole, [], "world")]
        self.pending = []  # calls on side streams whose results were not looked at yet
        self.log = []
        self.bits = []  # (step, digest) of results that are the same on all ranks of a group
        self.turn = 0

    def run(self):
        """Carry out the program; what must be the same on all ranks of a group."""
        for turn in range(1, self.steps + 1):
            self.turn = turn
            try:
                self._step()
            except BaseException as failure:
                story = "\n  ".join(self.log)
                raise AssertionError(
                    f"rank {self.rank}, seed {self.seed} ({SEED}={self.seed} replays it): step {self.turn} of\n"
                    f"  {story}\nfailed: {type(failure).__name__}: {failure}"
                ) from failure
        self._flush()
        self.rng.shuffle(self.entries)
        for entry in self.entries:
            if entry.group is not None:
                entry.group.close()
        return self.bits

    def _say(self, words):
        self.log.append(f"{self.turn}: {words}")

    def _step(self):
        rng = self.rng
        kind = rng.choices(["call", "mistake", "misrouted", "make", "close"], [10, 5, 2, 3, 1])[0]
        entry = rng.choice(self.entries)
        if kind == "make":
            return self._make(entry)
        if kind == "close" and len(self.entries) > 2:
            return self._close(rng.choice(self.entries[1:]))
        stream = rng.choice([None, None, "side", "other"])
        call = rng.choice(self.calls).draw(rng, len(entry.members), self.turn)
        if kind == "misrouted" and Experts in self.calls:
            call = Experts.draw(rng, len(entry.members), self.turn)
            refused = call.misrouted(rng)
            if refused is not None:
                return self._misrouted(entry, stream, *refused)
        if kind == "mistake" and len(entry.members) > 1:
            return self._mistake(entry, stream, call)
        self._call(entry, stream, call)

    def _on(self, stream):
        return nullcontext() if stream is None else self.world_stream(stream)

    def world_stream(self, stream):
        return self.current.world.stream(self.current.world_rank, stream)

    def _call(self, entry, stream, call):
        if entry.known and self.rng.random() < 0.4:  # something again, with other values
            call = replace(self.rng.choice(entry.known), turn=self.turn)
        entry.known.append(call)
        later = stream is not None and self.rng.random() < 0.7
        self._say(f"{call} on {entry.name} {entry.members}, stream {stream}, {'looked at later' if later else ''}")
        if entry.group is not None:
            self.current = entry.group
            with self._on(stream):
                made = call.start(entry.group)
            self.pending.append((entry, call, made))
        if not later:
            self._flush()

    def _flush(self):
        for entry, call, made in self.pending:
            entry.group.synchronize()
            digest = call.check(entry.group, made)
            if digest is not None:
                self.bits.append((call.turn, digest))
        self.pending.clear()

    def _mistake(self, entry, stream, call):
        rng, size = self.rng, len(entry.members)
        if entry.known and rng.random() < 0.5:
            call = replace(rng.choice(entry.known), turn=self.turn)
        call = plain(call)
        kind, other = draw_mistake(rng, call, size, self.turn, entry.known, self.calls)
        wrong = set(rng.sample(range(size), rng.choice([1, size - 1, rng.randint(1, size - 1)])))
        self._say(f"mistake: ranks {sorted(wrong)} do {kind} instead of {call} on {entry.name} {entry.members}, "
                  f"stream {stream}")  # fmt: skip
        again = rng.random() < 0.5
        group = entry.group
        if group is not None:
            self.current = group
            try:
                with self._on(stream):
                    (other if group.rank in wrong else call.start)(group)
                    group.synchronize()
            except mk.ArgumentError as refusal:
                self.log.append(f"    {refusal}")
            else:
                raise AssertionError("this rank was not told of the mistake")
        if again:
            self._call(entry, stream, call)

    def _misrouted(self, entry, stream, call, wrong, arguments, error):
        self._say(f"{error.__name__} by {arguments} of rank {wrong} of {call} on {entry.name} {entry.members}")
        group = entry.group
        if group is not None:
            self.current = group
            try:
                with self._on(stream):
                    call.start(group, **(arguments if group.rank == wrong else {}))
                    group.synchronize()
            except mk.RoutingError as refusal:
                if type(refusal) is not error:
                    raise
            else:
                raise AssertionError(f"no {error.__name__}")

    def _make(self, entry):
        rng = self.rng
        if self.make_more is not None and rng.random() < 0.5:
            self._flush()
            for members, group, name in self.make_more(rng):
                self._say(f"{name}: {members}")
                self.entries.append(Entry(tuple(members), group, [], f"group {len(self.entries)}"))
            return
        size, group = len(entry.members), entry.group
        if rng.random() < 0.5:
            ranks = rng.sample(range(size), rng.randint(1, size))
            self._say(f"subset {ranks} of {entry.name} {entry.members}")
            members = tuple(entry.members[rank] for rank in ranks)
            part = group.subset(ranks) if self.rank in members else None
            self.entries.append(Entry(members, part, [], f"group {self.turn}"))
            return
        colors = [rng.choice([0, 1, None]) for _ in range(size)]
        keys = [rng.randint(0, 2) for _ in range(size)]
        self._say(f"split {colors} {keys} of {entry.name} {entry.members}")
        part = group.split(colors[group.rank], keys[group.rank]) if group is not None else None
        for color in (0, 1):
            chosen = sorted((keys[rank], rank) for rank in range(size) if colors[rank] == color)
            members = tuple(entry.members[rank] for _, rank in chosen)
            if members:
                mine = part if self.rank in members else None
                assert mine is None or (mine.size, mine.rank) == (len(members), members.index(self.rank))
                self.entries.append(Entry(members, mine, [], f"group {self.turn}.{color}"))

    def _close(self, entry):
        self._say(f"close {entry.name} {entry.members}")
        self._flush()
        self.entries.remove(entry)
        if entry.group is not None:
            entry.group.close()


def compare_bits(results):
    """All ranks that have a result of a step have the same bits."""
    found = {}
    for rank, steps in enumerate(results):
        for step, digest in steps:
            first, expected = found.setdefault(step, (rank, digest))
            assert digest == expected, f"step {step}: ranks {first} and {rank} have different bits"
