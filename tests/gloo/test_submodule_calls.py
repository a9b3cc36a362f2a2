"""Modules called outside the model's forward give the same results as in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import (
    LlamaForCausalLM,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    TrainerCallback,
    default_data_collator,
)

import hf_fsdp_plugin as hfp
from hf_fsdp_plugin.problems import SpecError
from tests.support.matrices import slow
from tests.support.model_families import FAMILIES, NUM_ROWS, Batch
from tests.support.ranks import RankError, Ranks
from tests.support.tiny import MODELS, global_batch, my_part, parallel_config, tiny_llama
from tests.support.trainer_runs import losses, make_trainer
from tests.support.training import fresh_accelerator, sgd

NUM_STEPS = 3


class LlamaWithOffset(LlamaForCausalLM):
    """A llama whose ``generate`` reads a parameter of the model itself, as BLIP-2 reads its query tokens."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.offset = nn.Parameter(torch.ones(4))

    def generate(self, tokens: torch.Tensor, **kwargs: Any) -> Any:
        return super().generate(tokens + self.offset.sum().long() - 4, **kwargs)


class Generate(TrainerCallback):
    """Generates in every event of a training, and evaluates before the optimizer step."""

    def __init__(self) -> None:
        self.num_calls = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        kwargs["model"].generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)

    on_evaluate = on_step_begin = on_step_end

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_calls += 1
        with torch.no_grad():
            kwargs["model"](**global_batch(0))


class Sequences(torch.utils.data.Dataset):
    """The rows of global batches of T5."""

    def __init__(self, num_batches: int) -> None:
        batches = [FAMILIES["t5"].batch(step) for step in range(num_batches)]
        self.rows = [
            dict(zip(batch, row, strict=True)) for batch in batches for row in zip(*batch.values(), strict=True)
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        return self.rows[index]


VERSIONS = pytest.mark.parametrize("version", [1, 2])

LAYOUTS = pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), (1, {"fsdp_use_orig_params": False}), (2, {})],
    ids=["fsdp1", "fsdp1-flat", "fsdp2"],
)


def config_of(version: int, **settings: Any) -> dict[str, Any]:
    return parallel_config("full_shard", version, 2, **settings)


def pooled(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else features.pooler_output


def one_layer(model: Any, batch: Batch) -> torch.Tensor:
    hidden, positions = torch.ones(2, 3, 32), torch.arange(3)[None]
    output = model.model.layers[1](hidden, position_embeddings=model.model.rotary_emb(hidden, positions))
    return output[0] if isinstance(output, tuple) else output


def generating_model(how: str) -> Any:
    if how == "own parameter":
        return LlamaWithOffset(tiny_llama().config)
    return MODELS["lora" if how == "peft" else "llama"]()


def generate(config: dict[str, Any], how: str) -> tuple[list[int], list[int], bool]:
    """Generate with a prompt of another length on each rank.

    Return the tokens, those of the bare model, and whether the weights are unchanged.

    Args:
        how: the object whose ``generate`` is called, or the context in which it is.
    """
    accelerator = fresh_accelerator(config)
    prompt = torch.tensor([[1, 2, 3, 4][: 2 + accelerator.process_index]])
    arguments = {"max_new_tokens": 3 + accelerator.process_index, "do_sample": False, "eos_token_id": 95}
    torch.manual_seed(0)
    bare: Any = generating_model(how).eval()
    expected = bare.generate(prompt, **arguments)
    torch.manual_seed(0)
    model: Any = accelerator.prepare(generating_model(how))
    before = accelerator.get_state_dict(model)
    inner = accelerator.unwrap_model(model)
    if how in ("summoned", "root summoned"):
        context: Any = FullyShardedDataParallel.summon_full_params(model, recurse=how == "summoned", writeback=True)
        with context, torch.no_grad():
            tokens = inner.generate(prompt, **arguments)
    else:
        tokens = (model if how == "model" else inner).generate(prompt, **arguments)
    after = accelerator.get_state_dict(model)
    equal = all(torch.equal(before[key], after[key]) for key in before) and model.training
    return tokens.tolist(), expected.tolist(), equal


def family_calls(name: str) -> dict[str, Callable[[Any, Batch], Any]]:
    """Calls that libraries make on the unwrapped model of a family, other than its forward."""
    ids = "input_ids"
    calls: dict[str, Callable[[Any, Batch], Any]] = {
        "input embeddings": lambda model, batch: model.get_input_embeddings()(batch[ids]),
        "unwrapped model": lambda model, batch: next(iter(model(**batch).values())),
    }
    if name == "llama":
        calls |= {
            "head": lambda model, batch: model.get_output_embeddings()(torch.ones(2, 3, 32)),
            "base model": lambda model, batch: model.model(batch[ids]).last_hidden_state,
            "last logits": lambda model, batch: model(batch[ids], logits_to_keep=1).logits,
            "layer": one_layer,
            "norm": lambda model, batch: model.model.norm(torch.ones(2, 3, 32)),
        }
    if name == "gpt2":  # its embedding and head are tied
        calls["head"] = lambda model, batch: model.lm_head(torch.ones(2, 3, 32))
    if name == "t5":
        calls["encoder"] = lambda model, batch: model.get_encoder()(batch[ids]).last_hidden_state
        calls["generate"] = lambda model, batch: model.generate(batch[ids], max_new_tokens=4, do_sample=False)
    if name == "clip":
        calls |= {
            "text features": lambda model, batch: pooled(model.get_text_features(batch[ids])),
            "image features": lambda model, batch: pooled(model.get_image_features(batch["pixel_values"])),
        }
        del calls["input embeddings"]
    return calls


def call_submodules(name: str, config: dict[str, Any]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Make each call of a family before and after a forward. Return name -> result, and result of the bare model."""
    accelerator = fresh_accelerator(config)
    bare = FAMILIES[name].build().eval()
    model = accelerator.prepare(FAMILIES[name].build().eval())
    batch, results = FAMILIES[name].batch(0), {}
    for when in ("first", "after a forward"):
        for call, function in family_calls(name).items():
            with torch.no_grad():
                results[f"{call}, {when}"] = (function(accelerator.unwrap_model(model), batch), function(bare, batch))
        with torch.no_grad():
            model(**batch)
    return results


@VERSIONS
@pytest.mark.parametrize("name", ["llama", "clip", *(slow(name) for name in ("gpt2", "t5", "bert"))])
def test_submodule_calls_equal_those_of_bare_model(two_ranks: Ranks, name: str, version: int) -> None:
    layers = {"fsdp_transformer_layer_cls_to_wrap": ",".join(FAMILIES[name].layers)}
    for run in two_ranks.run(call_submodules, name, config_of(version, **layers)):
        for call, (found, expected) in run.items():
            torch.testing.assert_close(found, expected, msg=call)


@LAYOUTS
def test_submodule_calls_run_in_mixed_precision(two_ranks: Ranks, version: int, settings: dict[str, Any]) -> None:
    config = {**config_of(version, **settings), "mixed_precision": "bf16"}
    for run in two_ranks.run(call_submodules, "llama", config):
        for call, (found, expected) in run.items():
            torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2, msg=call)


def loss_by_parts(model: Any, batch: Batch) -> torch.Tensor:
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    batch = {name: value.to(model.device) for name, value in batch.items()}
    hidden = model.model(batch["input_ids"]).last_hidden_state
    logits = model.lm_head(hidden)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def snapshot(model: nn.Module) -> list[torch.Tensor | None]:
    tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters())]
    return [None if t is None else getattr(t, "_local_tensor", t).detach().clone() for t in tensors]


def same(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in zip(one, other, strict=True)
    )


def train_with_submodules(
    name: str, config: dict[str, Any], *, uses_head_weight: bool = False
) -> tuple[list[float], list[float], list[bool]]:
    """Train with a loss that calls base model and head, as ``compute_loss`` overrides do.

    Return the losses, those of one process, and whether parameters, gradients and modes were unchanged by a call of
    ``generate`` before each optimizer step.
    """
    accelerator = fresh_accelerator(config)
    rank, world_size = accelerator.process_index, accelerator.num_processes
    bare = MODELS[name]()
    optimizer = sgd(bare)
    expected = []
    for step in range(NUM_STEPS):
        loss = loss_by_parts(bare, global_batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model: Any = MODELS[name]()
    model, optimizer = accelerator.prepare(model, sgd(model))
    found, intact = [], []
    for step in range(NUM_STEPS):
        loss = loss_by_parts(accelerator.unwrap_model(model), my_part(global_batch(step), rank, world_size))
        accelerator.backward(loss)
        before = snapshot(model)
        accelerator.unwrap_model(model).generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
        intact.append(same(before, snapshot(model)) and model.training)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        found.append(total.item() / world_size)
    return found, expected, intact


@LAYOUTS
@pytest.mark.parametrize("name", ["llama", "lora"])
def test_loss_by_submodules_trains_as_in_one_process(
    two_ranks: Ranks, name: str, version: int, settings: dict[str, Any]
) -> None:
    if name == "lora":
        pytest.importorskip("peft")
        if settings:
            pytest.skip("a flat parameter is frozen or trained as a whole")
    found, expected, intact = two_ranks.run(train_with_submodules, name, config_of(version, **settings))[0]
    assert found == pytest.approx(expected, rel=1e-5)
    assert intact == [True] * NUM_STEPS


@LAYOUTS
@pytest.mark.parametrize("how", ["model", "unwrapped", "peft", "own parameter", "summoned", "root summoned"])
@pytest.mark.parametrize("precision", ["no", slow("bf16")])
def test_generate_works_wherever_it_is_called(
    two_ranks: Ranks, how: str, version: int, settings: dict[str, Any], precision: str
) -> None:
    if "summoned" in how and version == 2:
        pytest.skip("FSDP2 has no summon_full_params")
    if how == "peft":
        pytest.importorskip("peft")
        if settings:
            pytest.skip("a flat parameter is frozen or trained as a whole")
    for tokens, expected, equal in two_ranks.run(
        generate, {**config_of(version, **settings), "mixed_precision": precision}, how
    ):
        assert tokens == expected or (precision == "bf16" and len(tokens[0]) == len(expected[0]))
        assert equal


def resize(config: dict[str, Any]) -> None:
    accelerator = fresh_accelerator(config)
    accelerator.unwrap_model(accelerator.prepare(tiny_llama())).resize_token_embeddings(100)


@VERSIONS
def test_resize_of_sharded_embeddings_is_refused(two_ranks: Ranks, version: int) -> None:
    with pytest.raises(RankError, match="FSDP-E610"):
        two_ranks.run(resize, config_of(version))


def train_with_callback(output_dir: str, arguments: dict[str, Any]) -> tuple[list[float], list[float], int]:
    """Train with and without a callback that generates. Return both losses, and the number of its calls."""
    plain, callback = make_trainer(output_dir, **arguments), Generate()
    plain.train()
    generating = make_trainer(output_dir, callbacks=[callback], **arguments)
    generating.train()
    return losses(plain), losses(generating), callback.num_calls


@pytest.mark.parametrize(
    ("version", "settings"),
    [(1, {}), slow(1, {"fsdp_use_orig_params": False}), (2, {})],
)
def test_generate_in_callbacks_does_not_change_training(
    two_ranks: Ranks, tmp_path: Path, version: int, settings: dict[str, Any]
) -> None:
    use_orig = settings.get("fsdp_use_orig_params", True)
    fsdp_config = {
        "version": version,
        "use_orig_params": use_orig,
        "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
    }
    arguments = {"fsdp": "full_shard auto_wrap", "fsdp_config": fsdp_config, "eval_strategy": "steps", "eval_steps": 2}
    plain, generating, num_calls = two_ranks.run(train_with_callback, str(tmp_path), arguments)[0]
    assert generating == pytest.approx(plain, rel=1e-6)
    assert num_calls > 12


def generate_on_one_rank(output_dir: str, version: int, how: str) -> list[str]:
    """Generate on rank 0 only, with a Trainer after its training or with an Accelerator. Return the problem codes."""
    if how == "Trainer":
        trainer = make_trainer(output_dir, max_steps=1, fsdp="full_shard", fsdp_config={"version": version})
        trainer.train()
        model = trainer.model
    else:
        model = fresh_accelerator(parallel_config("full_shard", version, 2)).prepare(tiny_llama())
    if dist.get_rank() != 0:
        return []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SpecError, match="rank 1 did not call it") as caught:
        patch.setenv("HF_FSDP_ARRIVAL_TIMEOUT", "0.3")
        model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2)
    return [problem.code for problem in caught.value.problems]


@VERSIONS
@pytest.mark.parametrize("how", ["Trainer", "Accelerator"])
def test_generate_on_one_rank_raises(two_ranks: Ranks, tmp_path: Path, version: int, how: str) -> None:
    assert two_ranks.run(generate_on_one_rank, str(tmp_path), version, how) == [["FSDP-E670"], []]


def train_seq2seq(output_dir: str, config: dict[str, Any] | None, **arguments: Any) -> dict[str, Any]:
    """Train T5 with ``Seq2SeqTrainer`` and evaluate with ``generate`` after each step; without a config, unsharded."""
    if config is not None:
        hfp.install(config, report=f"{output_dir}/report.json")
    args = Seq2SeqTrainingArguments(
        output_dir=output_dir, per_device_train_batch_size=NUM_ROWS // dist.get_world_size(), max_steps=NUM_STEPS,
        per_device_eval_batch_size=1, eval_strategy="steps", eval_steps=1, predict_with_generate=True, use_cpu=True,
        generation_max_length=6, logging_steps=1, report_to="none", save_strategy="no", learning_rate=1e-2,
        **arguments,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=FAMILIES["t5"].build(),
        args=args,
        train_dataset=Sequences(NUM_STEPS),
        eval_dataset=Sequences(1),
        data_collator=default_data_collator,
        processing_class=None,
    )
    trainer.train()
    # One row less than the ranks divide: one rank repeats a row.
    tokens = trainer.predict(torch.utils.data.Subset(Sequences(1), range(NUM_ROWS - 1))).predictions
    return {
        "losses": losses(trainer),
        "eval losses": [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry],
        "tokens": tokens.tolist(),
    }


@VERSIONS
def test_seq2seq_trainer_generates_as_one_process(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path, version: int
) -> None:
    config = config_of(version, fsdp_transformer_layer_cls_to_wrap="T5Block")
    run = two_ranks.run(train_seq2seq, str(tmp_path), config)[0]
    expected = one_rank.run(train_seq2seq, str(tmp_path), None)[0]
    assert run["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert run["eval losses"] == pytest.approx(expected["eval losses"], rel=1e-5)
    assert run["tokens"] == expected["tokens"]
