"""An Accelerate training loop that ends as most do, with `unwrap_model(model).save_pretrained(…)`."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--form", choices=["all", "one", "state_dict", "peft", "after_eval"], default="all")
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--output_dir", default="out")
args = parser.parse_args()

set_seed(0)
accelerator = Accelerator()
tokenizer = AutoTokenizer.from_pretrained("bert-base-cased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-cased")
if args.form == "peft":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model, LoraConfig(task_type="SEQ_CLS", r=4, lora_dropout=0.0))
model = model.to(accelerator.device)


def collate(rows):
    texts = [[row[name] for row in rows] for name in ("sentence1", "sentence2")]
    labels = torch.tensor([row["label"] for row in rows])
    return {**tokenizer(*texts, padding=True, truncation=True, max_length=48, return_tensors="pt"), "labels": labels}


dataset = load_dataset("data/classes")
train = DataLoader(dataset["train"], batch_size=args.batch_size, collate_fn=collate)
test = DataLoader(dataset["test"], batch_size=args.batch_size, collate_fn=collate)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, train, test = accelerator.prepare(model, optimizer, train, test)

for step, batch in enumerate(train):
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print({"loss": accelerator.reduce(loss.detach(), "mean").item()})
    if step == 3:
        break

if args.form == "after_eval":
    model.eval()
    for batch in test:
        with torch.no_grad():
            loss = model(**batch).loss
        accelerator.print({"eval_loss": accelerator.reduce(loss, "mean").item()})

accelerator.wait_for_everyone()
unwrapped = accelerator.unwrap_model(model)
if args.form == "one":
    if accelerator.is_main_process:
        unwrapped.save_pretrained(args.output_dir)
elif args.form == "state_dict":
    unwrapped.save_pretrained(
        args.output_dir,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
else:
    unwrapped.save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
if accelerator.is_main_process:
    tokenizer.save_pretrained(args.output_dir)
accelerator.end_training()
