"""The script that the check ``launcher`` of gpu_check.py starts: a Trainer that saves and reports."""

import sys

from common import make_dataset, make_llama
from transformers import Trainer, TrainingArguments

output_dir, precision = sys.argv[1:]
arguments = TrainingArguments(
    output_dir,
    max_steps=6,
    per_device_train_batch_size=4,
    save_steps=3,
    save_total_limit=1,
    report_to="none",
    disable_tqdm=True,
    bf16=precision == "bf16",
    fp16=precision == "fp16",
)
model = make_llama(
    vocab_size=1024, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
Trainer(model, arguments, train_dataset=make_dataset(vocab_size=1024, length=32)).train()
