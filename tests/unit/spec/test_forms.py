"""The form of values that are text, such as devices; and keys that have no effect."""

import pytest

from hf_fsdp_plugin.vocabulary import ROWS

CLASSES = "fsdp_transformer_layer_cls_to_wrap"
VALID = [
    ("main_process_ip", "10.0.0.1"), ("main_process_ip", "::1"), ("main_process_ip", "fe80::1%eth0"),
    ("main_process_ip", "localhost"), ("main_process_ip", "node-0.cluster.local"),
    ("gpu_ids", "0,1"), ("gpu_ids", "GPU-8f3b2c1d-0a1b,GPU-8f3b2c1d-0a1c"),
    ("rdzv_backend", "static"), ("rdzv_backend", "c10d"),
    ("main_training_function", "main"),
]  # fmt: skip
INVALID = [
    ("main_process_ip", 10), ("main_process_ip", True), ("main_process_ip", ["a"]), ("main_process_ip", "a\nb"),
    ("gpu_ids", "a,b"), ("gpu_ids", "0,,1"), ("gpu_ids", "0,0"), ("gpu_ids", "-1"), ("gpu_ids", "0;1"),
    ("gpu_ids", "0.5"), ("gpu_ids", "01"), ("gpu_ids", True), ("gpu_ids", [True]), ("gpu_ids", {"a": 1}),
    ("gpu_ids", "all,0"), ("gpu_ids", "0,"), ("gpu_ids", "٣"), ("gpu_ids", [[0]]), ("gpu_ids", "0 1"),
    ("rdzv_backend", "foo"), ("rdzv_backend", "etcd"), ("rdzv_backend", True), ("rdzv_backend", ["static"]),
    ("dynamo_backend", "warp9"), ("dynamo_backend", 1), ("dynamo_mode", "fast"),
    ("main_training_function", 1),
    ("main_process_port", "29500a"), ("main_process_port", 70000), ("main_process_port", -1),
    ("machine_rank", "first"), ("machine_rank", True),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), VALID)
def test_text_of_the_form_is_accepted(assess, key, value):
    assessment = assess({"distributed_type": "FSDP", key: value})
    assert assessment.ok, assessment.problems
    assert assessment.spec.get(f"launch.{key}") == value


@pytest.mark.parametrize(("key", "value"), INVALID, ids=lambda value: str(value)[:30])
def test_text_of_another_form_is_refused(problems, key, value):
    (problem,) = problems({"distributed_type": "FSDP", key: value})
    assert problem.code == ("FSDP-E133" if value == 70000 else "FSDP-E101")
    assert problem.origin.spelling == key


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0, "0"), ([0, 1], "0,1"), ("0, 1", "0,1"), ("ALL", "all"), (["all"], "all"), (["GPU-a", 2], "GPU-a,2")],
)
def test_devices_are_normalized(assess, value, expected):
    assert assess({"distributed_type": "FSDP", "gpu_ids": value}).spec.launch.gpu_ids == expected


@pytest.mark.parametrize("value", ["INDUCTOR", "inductor", "DynamoBackend.INDUCTOR", "aot_eager", "no", False])
def test_backend_of_compile_is_accepted(assess, value):
    spec = assess({"distributed_type": "FSDP", "dynamo_config": {"dynamo_backend": value}}).spec
    expected = "no" if value is False else value.rpartition(".")[2].lower()
    assert spec.launch.dynamo_config["dynamo_backend"] == expected


@pytest.mark.parametrize(
    "name",
    ["class", "False", "None", "True", "lambda", "[A)", "[A", "A]", "1A", "A-B", "a.b.C", "A B", "A;B", "'A", "A(B)"],
)
def test_text_that_is_no_class_name_is_refused(problems, name):
    (problem,) = problems({"distributed_type": "FSDP", "fsdp_config": {CLASSES: name}})
    assert problem.code == ("FSDP-E050" if name == "None" else "FSDP-E144")


@pytest.mark.parametrize("value", [False, 1, ["A", 1], ["A", ""], ["A", []], "A,,B", ",", ",A", "[]", [","], {"A": 1}])
def test_value_that_is_no_list_of_names_is_refused(codes, value):
    assert codes({"distributed_type": "FSDP", "fsdp_config": {CLASSES: value}}) == ["FSDP-E101"]


@pytest.mark.parametrize(
    "value", ["A,B", "[A, B]", '["A", "B"]', "('A', 'B')", "{A,B}", ["A", "B", "A"], "A,B,", "'A',B"]
)
def test_ways_to_write_class_names(assess, value):
    assert assess({"distributed_type": "FSDP", "fsdp_config": {CLASSES: value}}).spec.wrap.classes == ("A", "B")


@pytest.mark.parametrize("value", [False, 1, ["a"], {"a": 1}, "a\nb"])
def test_pattern_of_modules_is_text(codes, value):
    assert codes({"distributed_type": "FSDP", "fsdp_config": {"fsdp_ignored_modules": value}}) == ["FSDP-E101"]


@pytest.mark.parametrize("row", [row for row in ROWS if row.ignored], ids=lambda row: row.key)
def test_key_without_effect_is_reported(assess, row):
    for value in ("something", *row.stock):
        given = {row.key: value} if row.scope == "launch" else {f"{row.scope}_config": {row.key: value}}
        found = [p for p in assess({"distributed_type": "FSDP", **given}).problems if p.code == "FSDP-W026"]
        assert [problem.origin.spelling for problem in found] == ([row.key] if value == "something" else [])


@pytest.mark.parametrize("key", ["log_dir", "tee", "max_restarts", "num_cpu_threads_per_process", "rdzv_conf", "role"])
def test_flag_of_the_launcher_is_no_key_of_the_config(problems, key):
    (problem,) = problems({"distributed_type": "FSDP", key: 7})
    assert (problem.code, problem.origin.spelling) == ("FSDP-E052", key)
    assert f"hf-fsdp launch --{key}" in problem.fix
