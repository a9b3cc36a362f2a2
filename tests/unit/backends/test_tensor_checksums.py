"""Hashes and sums of the bits of tensors.

A subclass without torch's kernel for hashes stands for a device type that has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_fsdp_plugin.backends.loading.equal_weights import hash_bits


class OfOtherDevice(torch.Tensor):
    """A tensor of a device type without hashes, as far as ``hash_bits`` can see."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.hash_tensor:
            raise NotImplementedError("no kernel for hash_tensor on this device")
        if function in (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist):
            raise AssertionError("the host waits for the device")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_hash_depends_on_every_element() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    changed = tensor.clone()
    changed[2, 3] = 12.0
    assert hash_bits(tensor).dtype is torch.int64 and hash_bits(tensor).shape == ()
    assert hash_bits(tensor) == hash_bits(tensor.clone()) != hash_bits(changed)


@pytest.mark.parametrize("begin", [0, 1])
def test_equal_changes_of_equal_elements_change_the_hash(begin: int) -> None:
    ones = torch.ones(65)[begin : begin + 64]
    assert torch.hash_tensor(ones) == torch.hash_tensor(ones * 0.5)
    halves, some = ones * 0.5, ones.clone()
    some[:2] = 0.5
    assert len({int(hash_bits(each)) for each in (ones, halves, some)}) == 3
    assert hash_bits(ones) == hash_bits(ones.clone())  # which begins at another address


def test_hash_without_a_kernel_is_computed_on_the_device() -> None:
    tensor = torch.arange(12.0)
    with pytest.raises(NotImplementedError):
        torch.hash_tensor(tensor.as_subclass(OfOtherDevice))
    changed = tensor.clone()
    changed[3] = 2.5
    found, again, other = (hash_bits(each.as_subclass(OfOtherDevice)) for each in (tensor, tensor.clone(), changed))
    assert found.dtype is torch.int64 and found.shape == ()
    assert torch.equal(found, again) and not torch.equal(found, other)


@pytest.mark.parametrize(
    "dtype",
    [torch.complex64, torch.complex128, torch.complex32, torch.bfloat16, torch.float8_e4m3fn, torch.uint16,
     torch.uint64, torch.bool],
    ids=str,
)  # fmt: skip
def test_every_dtype_has_a_hash(dtype: torch.dtype) -> None:
    tensor = torch.tensor([1.0, 0.0, 1.0]).to(dtype)
    changed = torch.tensor([1.0, 1.0, 1.0]).to(dtype)
    assert hash_bits(tensor) == hash_bits(tensor.clone()) != hash_bits(changed)


def test_hash_of_a_scalar_and_of_a_conjugate() -> None:
    tensor = torch.tensor([1 + 2j])
    assert hash_bits(tensor.conj()) == hash_bits(tensor.conj().resolve_conj()) != hash_bits(tensor)
    assert hash_bits(torch.tensor(3)) != hash_bits(torch.tensor(4))
