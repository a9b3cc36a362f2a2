"""The examples of the transformers repository (`--transformers-examples`): with the Trainer, and without it."""

from __future__ import annotations

from typing import Any

from scripts.ecosystem.cases.arguments import BEST, SEQUENTIAL, TRAINER
from scripts.ecosystem.model import ONE_PROCESS, TWO_PROCESSES, Case

_TRAINER = f"--do_train --do_eval {TRAINER} {SEQUENTIAL}"
_LOOP = (
    "--per_device_train_batch_size {batch} --per_device_eval_batch_size 2 --max_train_steps 4 --output_dir out --seed 1"
    " --learning_rate 1e-3"
)

# The Trainer multiplies the loss of a model that averages it itself (BERT, T5) by the number of processes, with every
# launcher; masks are random; scripts without the Trainer shuffle. Only this script is compared with one process.
_SAME_BATCHES = "language-modeling/run_clm"


def _case(script: str, model: str, start: str, data: str, arguments: str, **more: Any) -> Case:
    files = f"--train_file files/{data}/train.json --validation_file files/{data}/test.json"
    return Case(
        name=f"transformers examples {script.rpartition('/')[2]}",
        package="transformers",
        script=f"{{transformers}}/{script}.py",
        arguments=f"--model_name_or_path models/{start} {files} {arguments}",
        needs=("evaluate", "sklearn"),
        model=model,
        start=start,
        compared=ONE_PROCESS if script == _SAME_BATCHES else TWO_PROCESSES,
        **more,
    )


# Not here: the scripts for summarization, which download data of nltk. `documented.py` has Seq2SeqTrainer.
CASES = [
    _case("language-modeling/run_clm", "causal_lm", "llama", "lm", f"--block_size 32 {_TRAINER}"),
    _case("language-modeling/run_mlm", "masked_lm", "bert-lm", "lm", f"--max_seq_length 32 --line_by_line {_TRAINER}"),
    _case(
        "text-classification/run_glue", "classification", "bert", "classes", f"--max_seq_length 48 {_TRAINER} {BEST}"
    ),
    _case(
        "text-classification/run_classification",
        "classification",
        "bert",
        "classes",
        f"--text_column_names sentence1,sentence2 --label_column_name label --max_seq_length 48 {_TRAINER}",
    ),
    _case(
        "token-classification/run_ner",
        "tags",
        "bert-tags",
        "tags",
        f"--test_file files/tags/test.json --do_predict {_TRAINER}",
    ),
    _case(
        "question-answering/run_qa",
        "answers",
        "bert-answers",
        "questions",
        f"--max_seq_length 64 --doc_stride 16 {_TRAINER}",
    ),
    _case("language-modeling/run_clm_no_trainer", "causal_lm", "llama", "lm", f"--block_size 32 {_LOOP}"),
    _case(
        "language-modeling/run_mlm_no_trainer",
        "masked_lm",
        "bert-lm",
        "lm",
        f"--max_seq_length 32 --line_by_line true {_LOOP}",
    ),
    _case("text-classification/run_glue_no_trainer", "classification", "bert", "classes", f"--max_length 48 {_LOOP}"),
    _case("token-classification/run_ner_no_trainer", "tags", "bert-tags", "tags", _LOOP),
    _case(
        "question-answering/run_qa_no_trainer",
        "answers",
        "bert-answers",
        "questions",
        f"--max_seq_length 64 --doc_stride 16 {_LOOP}",
    ),
]
