"""Runs a kernel's PTX without a GPU: the few instructions that ours has, all threads of a CTA from barrier to barrier.

Threads and CTAs take turns in random order. Memory is not weak: what is stored is seen at once.
"""

import random
import re

BITS = {"u8": 8, "u32": 32, "u64": 64, "b64": 64}
SHARED = -1  # the only word of shared memory


class Kernel:
    def __init__(self, text: str):
        text = re.sub(r"//.*", "", text)
        self.parameter = re.search(r"\.param [^\[]* (\w+)\[", text).group(1)
        self.shared = re.search(r"\.shared [^;]* (\w+);", text).group(1)
        body = text[text.index("{") + 1 : text.rindex("}")]
        self.code: list[tuple[str | None, str, list[str]]] = []
        self.labels: dict[str, int] = {}
        for line in re.findall(r"\w+:|[^;:\n]+;", re.sub(r"^\s*\.(reg|shared).*$", "", body, flags=re.M)):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
                continue
            condition, operation, operands = re.fullmatch(r"\s*(?:@(\w+) )?([\w.]+)\s*(.*);", line).groups()
            self.code.append((condition, operation, re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", operands)))


class Thread:
    def __init__(self, run: "Run", cta: int, thread: int):
        self.run, self.cta, self.at = run, cta, 0
        self.registers = {"%tid.x": thread, "%ctaid.x": cta, "%nctaid.x": run.ctas}
        self.registers |= {run.kernel.parameter: 0, run.kernel.shared: SHARED}

    def value(self, operand: str) -> int:
        return int(operand) if re.fullmatch(r"-?\d+", operand) else self.registers[operand]

    def address(self, operand: str) -> int:
        base, _, offset = operand[1:-1].partition("+")
        return self.value(base) + int(offset or 0)

    def step(self) -> bool:
        """One instruction. False: a barrier, or the end."""
        condition, operation, operands = self.run.kernel.code[self.at]
        self.at += 1
        if condition is not None and not self.registers[condition]:
            return True
        name, *rest = operation.split(".")
        if name == "ret":
            self.at = -1
        if name in ("ret", "bar"):
            return False
        if name == "bra":
            self.at = self.run.kernel.labels[operands[0]]
        elif name in ("ld", "st"):
            self.access(name, rest, operands)
        elif name == "atom":
            assert rest == ["acq_rel", "gpu", "global", "inc", "u32"]
            address, limit = self.address(operands[1]), self.value(operands[2])
            old = self.run.load(address, 4)
            self.registers[operands[0]] = old
            self.run.store(address, (0 if old >= limit else old + 1).to_bytes(4, "little"))
        else:
            self.registers[operands[0]] = self.compute(name, rest, [self.value(operand) for operand in operands[1:]])
        return True

    def compute(self, name: str, rest: list[str], values: list[int]) -> int:
        if name == "setp":
            one, other = (value % 2 ** BITS[rest[1]] for value in values)
            return {"eq": one == other, "ne": one != other, "lt": one < other, "ge": one >= other}[rest[0]]
        if name == "selp":
            return values[0] if values[2] else values[1]
        if name in ("mov", "cvt"):
            return values[0]
        one, other = values
        bits = 64 if rest[0] == "wide" else BITS[rest[-1]]
        results = {"add": one + other, "sub": one - other, "mul": one * other, "min": min(one, other)}
        return (results | {"or": one | other, "and": one & other})[name] % 2**bits

    def access(self, name: str, rest: list[str], operands: list[str]) -> None:
        size = BITS[rest[-1]] // 8
        value, place = operands if name == "ld" else reversed(operands)
        registers = re.findall(r"\w+", value)
        address = self.address(place)
        assert len(registers) == (4 if "v4" in rest else 1)
        assert address % (size * len(registers)) == 0 or address == SHARED
        if name == "ld":
            for i, register in enumerate(registers):
                where = address + i * size
                load = self.run.load_parameter if rest[0] == "param" else self.load_shared if address < 0 else None
                self.registers[register] = (load or self.run.load)(where, size)
        elif address == SHARED:
            self.run.shared[self.cta] = self.registers[registers[0]]
        else:
            stored = b"".join(self.registers[register].to_bytes(size, "little") for register in registers)
            self.run.store(address, stored, "release" in rest)

    def load_shared(self, address: int, size: int) -> int:
        return self.run.shared[self.cta]


class Run:
    """A launch over `memory`, which begins at address `base`. `stores`: where, how much, and whether as a release."""

    def __init__(self, kernel: Kernel, parameter: bytes, memory: bytearray, base: int, ctas: int, threads: int):
        self.kernel, self.parameter, self.memory, self.base, self.ctas = kernel, parameter, memory, base, ctas
        self.shared: dict[int, int] = {}
        self.stores: list[tuple[int, int, bool]] = []
        rng = random.Random(5)
        waiting = [[Thread(self, cta, thread) for thread in range(threads)] for cta in range(ctas)]
        while waiting:
            group = rng.choice(waiting)
            rng.shuffle(group)
            for thread in group:
                while thread.step():
                    pass
            group[:] = [thread for thread in group if thread.at >= 0]
            waiting = [group for group in waiting if group]

    def load_parameter(self, address: int, size: int) -> int:
        assert 0 <= address <= len(self.parameter) - size
        return int.from_bytes(self.parameter[address : address + size], "little")

    def load(self, address: int, size: int) -> int:
        begin = address - self.base
        assert 0 <= begin <= len(self.memory) - size
        return int.from_bytes(self.memory[begin : begin + size], "little")

    def store(self, address: int, stored: bytes, release: bool = False) -> None:
        begin = address - self.base
        assert 0 <= begin <= len(self.memory) - len(stored)
        self.memory[begin : begin + len(stored)] = stored
        self.stores.append((address, len(stored), release))
