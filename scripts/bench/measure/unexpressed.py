"""What the dtype of the reduction changes, which Accelerate's config file cannot set: gradients and losses.

``mixed_precision: bf16`` makes Accelerate reduce gradients, accumulate them and compute the loss in bf16 under FSDP2.
This package keeps the reduction in fp32 unless it is set. All policies run through this package, with the same weights,
batches and units, on the same gloo ranks; the reference computes in fp32.

- Gradients of one optimizer step at the initial weights: relative L2 distance from the fp32 gradients, for one
  micro-batch and for several that are accumulated without synchronization.
- Losses of a training on real prose (the Python language reference, as bytes): the mean over the last steps, for
  several seeds, as difference from the fp32 training with the same seed.

    python -m scripts.bench unexpressed            (half an hour on 2 cores; writes docs/results/unexpressed.json)
    python -m scripts.bench unexpressed --quick --out /tmp/unexpressed.json
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from scripts.bench.common import make_llama, make_parser
from scripts.bench.ranks.forked import World, preload
from scripts.bench.tables.update_results import write_result

POLICIES: Final = {
    "fp32": {"precision.param": "fp32", "precision.reduce": "fp32"},
    "bf16, reduced in fp32 (this package)": {"precision.param": "bf16", "precision.reduce": "fp32"},
    "bf16, reduced in bf16": {"precision.param": "bf16", "precision.reduce": "bf16"},
    "bf16, reduced in bf16, loss in bf16 (Accelerate)": {
        "precision.param": "bf16", "precision.reduce": "bf16", "precision.output": "bf16",
    },
}  # fmt: skip
REFERENCE: Final = "fp32"
SIZES: Final = {
    "vocab_size": 256, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip

Report = Callable[[str, Any], None]


def parse_args() -> argparse.Namespace:
    parser = make_parser(__doc__, "unexpressed")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--last", type=int, default=30, help="steps at the end, whose mean loss is compared")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step")
    parser.add_argument("--length", type=int, default=128, help="bytes of a sample")
    parser.add_argument("--accumulation", type=int, nargs="*", default=[1, 16], help="micro-batches of a gradient")
    parser.add_argument("--quick", action="store_true", help="2 ranks, 10 steps, 1 seed")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.steps, args.last, args.seeds, args.accumulation = 2, 10, 5, 1, [1, 4]
    return args


def prose() -> Any:
    """Return the Python language reference as bytes."""
    from pydoc_data.topics import topics

    import torch

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def batches(args: argparse.Namespace, rank: int, seed: int) -> Iterator[Any]:
    """Yield batches of passages of the text at random places."""
    import torch

    text = prose()
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        starts = torch.randint(0, len(text) - args.length, (args.batch,), generator=generator)
        yield torch.stack([text[start : start + args.length] for start in starts.tolist()])


def prepared(args: argparse.Namespace, policy: str, seed: int) -> tuple[Any, Any, Any]:
    """Return an Accelerator, the sharded model and its optimizer."""
    import torch
    from accelerate.state import AcceleratorState, GradientState

    import hf_fsdp_plugin as hfp

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    settings = {
        "launch.distributed_type": "FSDP", "launch.num_processes": args.ranks, "launch.use_cpu": "true",
        "fsdp.version": 2, "wrap.policy": "transformer", **POLICIES[policy],
    }  # fmt: skip
    accelerator = hfp.accelerator(hfp.load_spec(overrides=settings, environ={}))
    model = make_llama(**SIZES, seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return accelerator, *accelerator.prepare(model.train(), optimizer)


def gradients(args: argparse.Namespace, rank: int, policy: str, accumulation: int) -> Any:
    """Return the whole gradient of all parameters as one vector, after micro-batches without synchronization."""
    import torch

    accelerator, model, _ = prepared(args, policy, seed=0)
    data = batches(args, rank, seed=0)
    for index in range(accumulation):
        model.set_requires_gradient_sync(index == accumulation - 1)
        ids = next(data)
        accelerator.backward(model(input_ids=ids, labels=ids).loss / accumulation)
    return torch.cat([parameter.grad.full_tensor().float().flatten() for parameter in model.parameters()])


def train(args: argparse.Namespace, rank: int, policy: str, seed: int) -> float:
    """Return the mean loss of all ranks over the last steps of a training."""
    import torch
    import torch.distributed as dist

    accelerator, model, optimizer = prepared(args, policy, seed)
    data = batches(args, rank, seed)
    losses = []
    for _ in range(args.steps):
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    mean = torch.tensor(statistics.fmean(losses[-args.last :]), dtype=torch.float64)
    dist.all_reduce(mean)
    return float(mean) / args.ranks


def measure(rank: int, report: Report, args: argparse.Namespace) -> None:
    for accumulation in args.accumulation:
        found = {policy: gradients(args, rank, policy, accumulation) for policy in POLICIES}
        reference = found[REFERENCE]
        errors = {
            policy: float((vector - reference).norm() / reference.norm())
            for policy, vector in found.items()
            if policy != REFERENCE
        }
        report("gradients", {"accumulation": accumulation, "errors": errors})
    for seed in range(args.seeds):
        for policy in POLICIES:
            report("loss", {"seed": seed, "policy": policy, "loss": train(args, rank, policy, seed)})


def main() -> None:
    args = parse_args()
    preload()
    with tempfile.TemporaryDirectory(prefix="unexpressed_") as folder:
        world = World.fork(measure, Path(folder) / "ranks.log", args, world_size=args.ranks)
        try:
            while not world.wait(1.0):
                world.listen(5.0)
            world.listen(0)
            if any(world.ended.values()):
                raise SystemExit(f"the ranks failed:\n{world.log.read_text()[-3000:]}")
        finally:
            world.close()
    events = world.events[0]
    errors = {str(value["accumulation"]): value["errors"] for _, name, value in events if name == "gradients"}
    losses: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    for _, name, value in events:
        if name == "loss":
            losses[value["policy"]].append(value["loss"])
    gaps = {
        policy: [own - other for own, other in zip(found, losses[REFERENCE], strict=True)]
        for policy, found in losses.items()
        if policy != REFERENCE
    }
    sizes = f"{SIZES['num_hidden_layers']} layers, hidden {SIZES['hidden_size']}"
    result = {
        "model": f"Llama, {sizes}, bytes of the Python language reference", "ranks": args.ranks, "steps": args.steps,
        "last_steps": args.last, "seeds": args.seeds, "gradient_error": errors, "final_loss": losses, "loss_gap": gaps,
    }  # fmt: skip
    write_result("unexpressed", args.out, result)


if __name__ == "__main__":
    main()
