"""mbarriers: what test_wait says after every step of a random sequence of arrivals and transactions."""

import numpy as np

from tests.emulator.kernels.case import Case, entry

_STEPS = 40
_LARGEST_COUNT, _LARGEST_BYTES = 5, 4096
_UNTOUCHED = 0xEE


class _Model:
    """An mbarrier, as the PTX ISA describes it."""

    def __init__(self, count: int) -> None:
        self.count, self.pending, self.bytes, self.phase = count, count, 0, 0

    def apply(self, step: tuple[str, int]) -> None:
        kind, number = step
        if kind in ("expect_tx", "arrive_expect_tx"):
            self.bytes += number
        if kind == "complete_tx":
            self.bytes -= number
        if kind == "arrive_drop":
            self.count -= 1
        arrivals = number if kind == "arrive" else int(kind in ("arrive_expect_tx", "arrive_drop"))
        self.pending -= arrivals
        if kind != "expect_tx" and self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def steps(self) -> list[str]:
        """Kinds that are valid now, without those that end the arrivals while bytes have come unannounced."""
        kinds = ["expect_tx"]
        if self.bytes > 0 or self.pending:
            kinds += ["complete_tx"] * 2
        if self.pending > 1 or (self.pending and self.bytes >= 0):
            kinds += ["arrive"] * 3 + ["arrive_expect_tx"]
            if self.count > 1:
                kinds.append("arrive_drop")
        return kinds


_INSTRUCTIONS = {
    "arrive": "mbarrier.arrive.shared::cta.b64 %d1, [%r1], {};",
    "arrive_drop": "mbarrier.arrive_drop.shared::cta.b64 %d1, [%r1];",
    "arrive_expect_tx": "mbarrier.arrive.expect_tx.shared::cta.b64 %d1, [%r1], {};",
    "expect_tx": "mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], {};",
    "complete_tx": "mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], {};",
}


def _script(rng: np.random.Generator, model: _Model) -> list[tuple[str, int]]:
    steps = []
    while len(steps) < _STEPS:
        kind = str(rng.choice(model.steps()))
        number = int(rng.integers(1, _LARGEST_BYTES))
        if kind == "arrive":
            number = int(rng.integers(1, model.pending + (model.bytes >= 0)))
        if kind == "complete_tx" and model.bytes > 0 and (rng.random() < 0.7 or not model.pending):
            number = model.bytes
        if kind == "expect_tx" and model.bytes < 0 and rng.random() < 0.7:
            number = -model.bytes
        model.apply((kind, number))
        steps.append((kind, number))
    return steps


def _record(index: int) -> str:
    return "".join(
        f"mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r1], {parity};\n"
        f"selp.u32 %r10, 1, 0, %p1;\nst.global.u8 [%out+{2 * index + parity}], %r10;\n"
        for parity in (0, 1)
    )


def _random_sequence(seed: int) -> Case:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, _LARGEST_COUNT + 1))
    script = _script(rng, _Model(count))
    body = f"setp.ne.u32 %p0, %r0, 0;\n@%p0 ret;\nmbarrier.init.shared::cta.b64 [%r1], {count};\n{_record(0)}"
    model, expected = _Model(count), [[0, 1]]
    for i, (kind, number) in enumerate(script, 1):
        body += _INSTRUCTIONS[kind].format(number) + "\n" + _record(i)
        model.apply((kind, number))
        expected.append([model.phase & 1, 1 - (model.phase & 1)])
    expected = np.array(expected, np.uint8).reshape(-1)
    arguments = (np.full_like(expected, _UNTOUCHED),)
    return Case(f"mbarrier_{seed}", entry({"out": "pointer"}, body), arguments, {0: expected}, shared_bytes=8)


def _tokens() -> Case:
    """Waits for the phase of a state, and what is pending of it."""
    tests = "".join(
        f"mbarrier.test_wait.shared::cta.b64 %p{i}, [%r1], %d{i};\nselp.u32 %r1{i}, 1, 0, %p{i};\n"
        f"st.global.u32 [%out+{{}}], %r1{i};\n"
        for i in (1, 2)
    )
    body = f"""
setp.ne.u32 %p0, %r0, 0;
@%p0 ret;
mbarrier.init.shared::cta.b64 [%r1], 3;
mbarrier.arrive.shared::cta.b64 %d1, [%r1];
mbarrier.arrive.shared::cta.b64 %d2, [%r1];
{tests.format(0, 4)}
mbarrier.arrive.shared::cta.b64 %d3, [%r1];
{tests.format(8, 12)}
mbarrier.arrive.shared::cta.b64 %d4, [%r1], 3;
mbarrier.test_wait.shared::cta.b64 %p4, [%r1], %d4;
selp.u32 %r10, 1, 0, %p4;
st.global.u32 [%out+16], %r10;
mbarrier.inval.shared::cta.b64 [%r1];
mbarrier.init.shared::cta.b64 [%r1], 1;
mbarrier.arrive.shared::cta.b64 %d5, [%r1];
mbarrier.test_wait.shared::cta.b64 %p5, [%r1], %d5;
selp.u32 %r10, 1, 0, %p5;
st.global.u32 [%out+20], %r10;
"""
    expected = np.array([0, 0, 1, 1, 1, 1], np.uint32)
    return Case(
        "mbarrier_tokens", entry({"out": "pointer"}, body), (np.zeros_like(expected),), {0: expected}, shared_bytes=8
    )


def _pending_counts() -> Case:
    body = "setp.ne.u32 %p0, %r0, 0;\n@%p0 ret;\nmbarrier.init.shared::cta.b64 [%r1], 3;\n"
    for i in range(4):
        body += (
            "mbarrier.arrive.shared::cta.b64 %d1, [%r1];\nmbarrier.pending_count.b64 %r10, %d1;\n"
            f"st.global.u32 [%out+{4 * i}], %r10;\n"
        )
    arguments = (np.full(4, _UNTOUCHED, np.uint32),)
    return Case("mbarrier_pending_count", entry({"out": "pointer"}, body), arguments, {}, shared_bytes=8)


def cases() -> list[Case]:
    """All cases."""
    return [*(_random_sequence(seed) for seed in range(12)), _tokens(), _pending_counts()]
