"""Fine-tune a causal language model in an Accelerate loop: prepare, accumulate, clip, evaluate, save, resume.

accelerate launch --config_file configs/fsdp2_full_shard.yaml scripts/train_loop.py --max_steps 20
hf-fsdp launch --max_restarts 3 --config_file configs/fsdp2_full_shard.yaml scripts/train_loop.py --save_every 5
torchrun --nproc_per_node 2 --max_restarts 3 -m hf_fsdp_plugin --config_file CONFIG scripts/train_loop.py --save_every 5
python scripts/train_loop.py --max_steps 2 --num_layers 2 --cpu              (one process, no FSDP)
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from data import PYTHON_DOCS, SMOLLM2, load_causal_lm, load_text, load_tokenizer, pack
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, get_scheduler

import hf_fsdp_plugin as hfp


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", default=SMOLLM2)
    parser.add_argument("--num_layers", type=int, help="keep only the first layers, for quick trials")
    parser.add_argument("--text", nargs="+", default=[PYTHON_DOCS], help=f"text files, or {PYTHON_DOCS}")
    parser.add_argument("--max_length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--batch_size", type=int, default=2, help="sequences per rank and micro-step")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument(
        "--max_steps", type=int, default=20, help="total optimizer steps, including those before --resume"
    )
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--eval_every", type=int, default=10, help="steps between evaluations; 0: never")
    parser.add_argument("--num_eval_sequences", type=int, default=16)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/loop"))
    parser.add_argument("--save_every", type=int, default=0, help="steps between checkpoints; 0: only at the end")
    parser.add_argument("--resume", type=Path, help="checkpoint folder (step-N) to resume from")
    parser.add_argument("--mixed_precision", choices=["no", "bf16", "fp16"], help="default: set by the launcher")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


@torch.no_grad()
def evaluate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader) -> float:
    """Return the mean loss of the evaluation sequences over all ranks."""
    model.eval()
    losses = [accelerator.gather_for_metrics(model(**batch).loss.detach().float().reshape(1)) for batch in loader]
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args = parse_args()
    set_seed(args.seed)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),  # a resumed run uses the same order
        cpu=args.cpu,
    )

    tokenizer = load_tokenizer(args.model_name_or_path)
    model = load_causal_lm(args.model_name_or_path, num_layers=args.num_layers)
    with accelerator.main_process_first():
        sequences = pack(load_text(args.text), tokenizer, length=args.max_length)
    parts = sequences.train_test_split(test_size=args.num_eval_sequences, seed=args.seed)
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    train_loader = DataLoader(
        parts["train"], batch_size=args.batch_size, shuffle=True, collate_fn=collator, drop_last=True
    )
    eval_loader = DataLoader(parts["test"], batch_size=args.batch_size, collate_fn=collator)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # The prepared scheduler advances num_processes times per step.
    scheduler = get_scheduler("cosine", optimizer, 0, args.max_steps * accelerator.num_processes)
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )

    # After a restart by any launcher: the newest checkpoint of this run. At the first start there is none.
    args.resume = hfp.newest_checkpoint(args.output_dir, this_run=True) or args.resume
    step = 0
    if args.resume is not None:
        accelerator.load_state(args.resume)
        step = int(args.resume.name.removeprefix("step-"))
        accelerator.print(f"resumed after step {step} from {args.resume}")

    def save() -> None:
        folder = args.output_dir / f"step-{step}"
        accelerator.save_state(folder)
        accelerator.print(f"saved {folder}")

    # A restart on another number of ranks changes it, so that a step has as many sequences as before.
    accumulation = accelerator.gradient_accumulation_steps
    steps_per_epoch = math.ceil(len(train_loader) / accumulation)
    while step < args.max_steps:
        done = (step % steps_per_epoch) * accumulation
        batches = accelerator.skip_first_batches(train_loader, done) if done else train_loader
        micro_losses = []
        for batch in batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                micro_losses.append(loss.detach().float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            step += 1
            mean = accelerator.reduce(torch.stack(micro_losses).mean(), reduction="mean").item()
            accelerator.print(f"step {step} loss {mean:.4f} grad_norm {float(norm):.3f}", flush=True)
            micro_losses.clear()
            if args.eval_every and step % args.eval_every == 0:
                accelerator.print(f"step {step} eval_loss {evaluate(accelerator, model, eval_loader):.4f}", flush=True)
            if args.save_every and step % args.save_every == 0 and step < args.max_steps:
                save()
            if step >= args.max_steps:
                break
    save()
    accelerator.end_training()


if __name__ == "__main__":
    main()
