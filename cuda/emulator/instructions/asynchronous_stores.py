"""st.async and red.async: stores and reductions into shared memory of the cluster that complete on an mbarrier.

They take effect in the generic proxy, in any order.
"""

from __future__ import annotations

import numpy as np

from ..errors import BarrierFaultError, MemoryFaultError
from ..machine.memory import OFFSET_MASK, RANK_SHIFT
from ..ptx.syntax import Instruction, Vector
from .access import UINT, address_value, form_of
from .atomics import reduction
from .handler import Handler, Value, handles, lane_value, lanes, unsupported

_COMPLETION = "mbarrier::complete_tx::bytes"


@handles("st.async", "red.async")
def asynchronous_store(instruction: Instruction) -> Handler:
    """{st, red}.async{.sem}{.scope}.shared::cluster.mbarrier::complete_tx::bytes{.op}{.vec}.type [a], b, [mbarrier]."""
    form = form_of(instruction, "weak" if instruction.parts[0] == "st" else "relaxed")
    if form.space != "shared::cluster" or _COMPLETION not in form.rest or form.size < 4:
        raise unsupported(instruction)
    operations = [part for part in form.rest if part not in ("async", _COMPLETION)]
    if len(operations) != (instruction.parts[0] == "red"):
        raise unsupported(instruction)
    combine = reduction(instruction, operations[0], form) if operations else None
    address, source, barrier = instruction.operands
    items = source.items if isinstance(source, Vector) else (source,)
    nbytes = form.size * form.count

    def one(warp, address: int, values: list[int], barrier: int) -> None:
        cta, offset = warp.cta.shared_target(address, instruction)
        if barrier >> RANK_SHIFT != address >> RANK_SHIFT:
            raise BarrierFaultError(f"{instruction.where}: the mbarrier is not in the CTA of the destination")
        if offset % nbytes:
            raise MemoryFaultError(f"{instruction.where}: an access of {nbytes} bytes is misaligned")
        warp.cta.mbarrier(barrier, warp.actor, instruction)
        where = np.arange(form.count) * form.size + (address & OFFSET_MASK)

        def effect(operation) -> None:
            data = np.array(values, UINT[form.size])
            if combine is not None:
                data = combine(cta.shared.read(where, form.size, operation.actor, instruction, True), data)
            cta.shared.write(where, data, form.size, operation.actor, instruction, form.strong)
            cta.mbarrier(barrier, operation.actor, instruction).complete(nbytes, operation.actor)
            warp.machine.changed()

        warp.machine.issue(warp, "copy", instruction, effect)

    def run(warp, mask, address, barrier, *values) -> None:
        for lane in lanes(mask):
            mine = [lane_value(v, lane) for v in values]
            one(warp, lane_value(address, lane), mine, lane_value(barrier, lane))

    inputs = [address_value(address), address_value(barrier), *(Value(item, form.type) for item in items)]
    return Handler(run, inputs=inputs)
