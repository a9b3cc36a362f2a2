"""``advise``: compares strategies, meshes, units, checkpointing, offload and micro-batches, and ranks what fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import nn

from hf_fsdp_plugin.estimate.machines import Machine
from hf_fsdp_plugin.estimate.planner_evaluator import Evaluator, Subject
from hf_fsdp_plugin.estimate.planner_remedies import remedies
from hf_fsdp_plugin.estimate.planner_rows import Advice, in_order, row_cost, with_reasons
from hf_fsdp_plugin.estimate.planner_search import Search
from hf_fsdp_plugin.estimate.planner_time import Times
from hf_fsdp_plugin.estimate.workload import Attention, Optimizer, UpdateLoop
from hf_fsdp_plugin.problems import Problem, SpecError
from hf_fsdp_plugin.spec.model import DtypeName, Version

HEADROOM: Final = 0.95
"""Part of a device's memory that a row may need. The rest is for the error of the prediction."""


def advise(
    model: nn.Module,
    *,
    seq_len: int,
    global_batch: int,
    gpu_memory: int,
    num_machines: int = 1,
    gpus_per_machine: int = 8,
    machine: Machine | None = None,
    version: Version = 2,
    precision: DtypeName = "bf16",
    wrap: Mapping[str, Any] | None = None,
    optimizer: Optimizer = "adamw",
    update_loop: UpdateLoop | None = None,
    clip_norm: bool = True,
    attention: Attention = "sdpa",
    headroom: float = HEADROOM,
) -> Advice:
    """Return the combinations of settings that fit, the best first, and why the others do not.

    Offload of parameters is tried only if nothing fits without it. A combination that does not fit is not tried with a
    larger micro-batch, and a strategy that does not fit with full checkpointing and offloaded activations is not tried
    with less. Other units than the layers are tried where they can be better: see :mod:`planner_search`.

    Args:
        model: on the meta device, not sharded. It is unchanged afterwards.
        global_batch: samples of all ranks per optimizer step.
        gpu_memory: bytes of a device.
        machine: figures of devices and links, which predict tokens/s. Without them, rows that fit are ranked by
            recomputation and communication.
        precision: ``bf16`` or ``fp16`` with fp32 master weights, or ``auto`` for the model's dtype.
        wrap: settings of the wrap policy, such as ``{"wrap.policy": "size", "wrap.min_num_params": 10**8}``. Default:
            the layer classes that the model declares. Other units are compared with these.
        headroom: part of the device's memory that may be used, above 0 and at most 1.

    Raises:
        SpecError: the global batch is not divisible by the number of ranks (FSDP-E812), the model cannot be planned, or
            it has other inputs than a batch of text or images (FSDP-E811).
    """
    world_size = num_machines * gpus_per_machine
    if global_batch < 1 or global_batch % world_size:
        raise SpecError([_indivisible(global_batch, world_size)])
    subject = Subject(
        model=model, seq_len=seq_len, version=version, precision=precision, wrap=wrap or {}, optimizer=optimizer,
        update_loop=update_loop, clip_norm=clip_norm, attention=attention, num_machines=num_machines,
        gpus_per_machine=gpus_per_machine,
    )  # fmt: skip
    evaluator = Evaluator(subject, Times(model, machine) if machine is not None else None)
    limit = int(gpu_memory * headroom)
    search = Search(evaluator, global_batch, limit)
    rows = list(search.rows(offload=False))
    if not any(row.fits for row in rows):
        rows += search.rows(offload=True)
    rows += search.with_other_units(sorted((row for row in rows if row.fits), key=row_cost))
    fitting = in_order([row for row in rows if row.fits], limit)
    rejected = sorted((row for row in rows if not row.fits), key=lambda row: row.needed_bytes)
    return Advice(
        rows=(*with_reasons(fitting), *rejected),
        gpu_memory=gpu_memory,
        limit=limit,
        remedies=() if fitting else remedies(subject, global_batch, limit),
        problems=tuple(evaluator.problems),
    )


def _indivisible(global_batch: int, world_size: int) -> Problem:
    smaller = global_batch - global_batch % world_size
    near = f"{smaller} or {smaller + world_size}" if smaller > 0 else str(world_size)
    return Problem(
        code="FSDP-E812",
        message=f"a global batch of {global_batch} is not divisible by {world_size} ranks.",
        fix=f"Use a global batch of {near}, or another number of ranks.",
    )
