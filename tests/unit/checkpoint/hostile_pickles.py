"""Pickles of a few bytes that exhaust time, memory or the stack of a reader, and mutations of valid ones."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator


def _doubled(first: bytes, double: bytes, times: int) -> bytes:
    """Return instructions that make an object of two references to the previous one, again and again."""
    return first + b"".join(b"q%ch%c%b" % (i, i, double) for i in range(times))


ATTACKS: dict[str, bytes] = {
    "a key of shared tuples": b"\x80\x02}" + _doubled(b")", b"\x86", 60) + b"Ns.",
    "a key of shared tuples among others": b"\x80\x02}(" + _doubled(b")", b"\x86", 60) + b"Nu.",
    "an element of a set of shared tuples": b"\x80\x04\x8f(" + _doubled(b")", b"\x86", 60) + b"\x90.",
    "a frozenset of shared tuples": b"\x80\x04(" + _doubled(b")", b"\x86", 60) + b"\x91.",
    "an attribute of shared tuples": b"\x80\x02ctorch\nTensor\n)\x81}X\x03\x00\x00\x00fqn"
    + _doubled(b")", b"\x86", 60)
    + b"sb.",
    "a key of a million nested tuples": b"\x80\x02})" + b"\x85" * 1_000_000 + b"Ns.",
    "a key of nested tuples made of marks": b"\x80\x02}" + b"(" * 500_000 + b"t" * 500_000 + b"Ns.",
    "the same large key again and again": b"\x80\x02}(" + b"K\x01" * 4000 + b"tq\x000" + b"h\x00Ns" * 1_000_000 + b".",
    "lists of shared lists": b"\x80\x02" + b"]" + b"".join(b"q%c0(h%ch%cl" % (i, i, i) for i in range(60)) + b".",
    "dicts of shared dicts": b"\x80\x02" + b"}" + b"".join(b"q%c0(Nh%cVx\nh%cd" % (i, i, i) for i in range(60)) + b".",
    "a list that contains itself": b"\x80\x02]q\x00h\x00a.",
    "sizes of the same list": b"\x80\x02](" + b"K\x01" * 20_000 + b"eq\x00ctorch\nSize\nq\x01"
    + b"h\x01h\x00\x85R0" * 20_000 + b".",
    "sets of the same list": b"\x80\x02](" + b"K\x01" * 20_000 + b"eq\x00cbuiltins\nset\nq\x01"
    + b"h\x01h\x00\x85R0" * 20_000 + b".",
    "bytes of the same text": b"\x80\x02X" + (50_000).to_bytes(4, "little") + b"a" * 50_000
    + b"q\x00c_codecs\nencode\nq\x01" + b"h\x01h\x00\x85Rq\x020" * 20_000 + b".",
    "a path of the same text": b"\x80\x02X" + (50_000).to_bytes(4, "little") + b"a" * 50_000
    + b"q\x000cpathlib\nPosixPath\n(" + b"h\x00" * 9_000 + b"tR.",
}  # fmt: skip
"""Name -> pickle, which must be refused with FSDP-E455."""

SET_ATTRIBUTES: dict[str, bytes] = {
    name: b"\x80\x02" + target + b"(N}X\x06\x00\x00\x00hackedX\x03\x00\x00\x00yess" + b"tb."
    for name, target in {
        "Metadata": b"ctorch.distributed.checkpoint.metadata\nMetadata\n",
        "TensorProperties": b"ctorch.distributed.checkpoint.metadata\nTensorProperties\n",
        "TensorMeta": b"ctorch.distributed.tensor._dtensor_spec\nTensorMeta\n",
        "ShardOrderEntry": b"ctorch.distributed.tensor._dtensor_spec\nShardOrderEntry\n",
        "Shard": b"ctorch.distributed.tensor.placement_types\nShard\n",
        "device": b"ctorch\ndevice\n",
        "Size": b"ctorch\nSize\n",
        "_rebuild_tensor_v2": b"ctorch._utils\n_rebuild_tensor_v2\n",
        "getattr": b"cbuiltins\ngetattr\n",
        "OrderedDict": b"ccollections\nOrderedDict\n",
        "set": b"cbuiltins\nset\n",
        "float32": b"ctorch\nfloat32\n",
        "a class behind a call": b"ctorch\ndevice\nctorch.distributed.checkpoint.metadata\nMetadata\n\x85R",
    }.items()
}
"""Name -> pickle that sets the attribute ``hacked`` of the stand-in for this name."""


def mutations(samples: list[bytes], count: int, seed: int) -> Iterator[bytes]:
    """Yield damaged copies of valid pickles: bytes are changed, removed, repeated or taken from another place."""
    chance = random.Random(seed)
    opcodes = b"(.0125FINSUVXabcd]egihjloqprstu}\x81\x85\x86\x87\x88\x8c\x8f\x90\x91\x92\x93\x94\x95)QPRB"
    for _ in range(count):
        data = bytearray(chance.choice(samples))
        for _ in range(chance.choice((1, 1, 2, 5, 20))):
            at, length = chance.randrange(len(data)), chance.randrange(1, 12)
            kind = chance.randrange(5)
            if kind == 0:
                data[at] = chance.randrange(256)
            elif kind == 1:
                data[at] = chance.choice(opcodes)
            elif kind == 2:
                del data[at : at + length]
            elif kind == 3:
                data[at:at] = data[at : at + length] * chance.choice((1, 2, 50))
            else:
                start = chance.randrange(len(data))
                data[at : at + length] = data[start : start + length]
            data = data or bytearray(b".")
        yield bytes(data)


def samples() -> list[bytes]:
    """Return valid pickles: plain values, an optimizer's state dict, and the names of DCP."""
    tensors = {f"layers.{i}.weight": (i, (4, 4), [1, 2], {"dtype": "float32"}) for i in range(5)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.99), "params": list(tensors), "set": {1, 2}, "raw": b"\x00\xff"}]
    plain = [pickle.dumps({"state": tensors, "param_groups": groups}, protocol) for protocol in (0, 2, 4, 5)]
    return [*plain, *SET_ATTRIBUTES.values()]
