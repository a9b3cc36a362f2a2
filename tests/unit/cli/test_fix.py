"""``hf-fsdp check --fix``: what is corrected, and that nothing else changes."""

import pytest

HEAD = "# my config\ndistributed_type: FSDP\n\n"


@pytest.fixture
def fixed(hf_fsdp, tmp_path, monkeypatch):
    """Return the exit code, the corrected text and stderr for a config."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, name: str = "c.yaml"):
        (tmp_path / name).write_bytes(text.encode())
        code, out, err = hf_fsdp("check", "--fix", name)
        assert (tmp_path / name).read_bytes() == text.encode()
        return code, out, err

    return run


def test_keys_and_values_are_corrected_and_pass(fixed, hf_fsdp, tmp_path):
    text = (
        HEAD + "fsdp_config:   # all of it\n"
        "    fsdp_versoin: 2      # the new one\n"
        "    'fsdp_offload_param':   false\n\n"
        '    fsdp_state_dict_type: "SHARDED_STATE_DIC"  # why\n'
    )
    right = text.replace("versoin", "version").replace("offload_param'", "offload_params'")
    code, out, err = fixed(text)
    assert code == 0 and out.startswith(right.partition("    fsdp_state")[0]) and out.endswith('"  # why\n')
    assert "c.yaml:5: fsdp_versoin → fsdp_version\n" in err and err.count(" → ") == 3
    (tmp_path / "right.yaml").write_text(out)
    assert hf_fsdp("check", "right.yaml")[0] == 0


def test_misspelled_value_of_a_misspelled_key_is_corrected(fixed):
    code, out, _ = fixed(HEAD + "fsdp_config:\n  fsdp_auto_wrap_polcy: TRANSFORMER_BASED_WARP\n")
    assert code == 0 and out.startswith(f"{HEAD}fsdp_config:\n  fsdp_auto_wrap_policy: ") and "WARP" not in out


def test_json_and_flow_mappings_are_corrected(fixed):
    text = '{"distributed_type": "FSDP",\r\n\t"fsdp_config": {"fsdp_versoin": 2, "fsdp_offload_param": false}}\r\n'
    code, out, _ = fixed(text, "c.json")
    assert code == 0 and out == text.replace("versoin", "version").replace("offload_param", "offload_params")


def test_word_of_fsdp_options_is_corrected(fixed):
    text = "output_dir: out\nfsdp: full_shrd auto_wrap   # stages\n"
    code, out, _ = fixed(text)
    assert code == 0 and out == text.replace("full_shrd", "full_shard")


def test_valid_config_is_printed_unchanged(fixed):
    text = HEAD + "fsdp_config: {fsdp_version: 2}  # ü\n"
    assert fixed(text)[:2] == (0, text)


def test_remaining_error_is_printed_and_exits_1(fixed):
    code, out, err = fixed(HEAD + "fsdp_config:\n  fsdp_versoin: 2\n  qqqqqq: 1\n")
    assert code == 1 and "  fsdp_version: 2\n  qqqqqq: 1\n" in out
    assert "'qqqqqq'" in err and err.endswith("c.yaml (corrected): 1 error\n")


def test_invalid_config_is_unchanged_and_missing_one_is_usage(fixed, hf_fsdp):
    assert fixed("a: [")[:2] == (1, "a: [")
    assert hf_fsdp("check", "--fix", "none.yaml")[:2] == (2, "")


@pytest.mark.parametrize("key", ['"fsdp_sharding_strateg\\e]0;x\\ay": FULL_SHARD', '"fsdp_versoin\\e": 2'])
def test_correction_of_a_part_of_a_key_ends(fixed, key):
    """The correction leaves the escape sequence, so the key is still unknown."""
    code, out, err = fixed(HEAD + f"fsdp_config:\n  {key}\n")
    assert code == 1 and "\\" in out and "1 error" in err
