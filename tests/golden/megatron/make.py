"""Makes the files beside it, as Megatron-LM's distributed optimizer of November 2023 saves them, with torch. Run it in this folder.

Two chunks, parameters in registration order. Element i of parameter number p has master 1000 (p + 1) + i + 0.5, first moment -master / 8,
second moment master / 64. What belongs to no parameter is NaN, since it is uninitialised memory there.
"""

import collections
import math

import torch

CHUNKS = [
    [("embed.table", 21), ("first.weight", 20), ("first.bias", 5)],  # embed.frozen has no gradient, so it is in no buffer
    [("second.weight", 9), ("head.bias", 7)],
]
FIELDS = {"param": lambda x: x, "exp_avg": lambda x: -x / 8, "exp_avg_sq": lambda x: x / 64}


def buckets_of(chunk, ranks, bucket_size):
    """Per bucket a list of (number, numel), and its padded length: from the last parameter on, closed once it is full."""
    first = sum(len(before) for before in CHUNKS[:chunk])
    buckets, params, numel = [], [], 0
    for number, (_, length) in reversed(list(enumerate(CHUNKS[chunk], first))):
        params.append((number, length))
        numel += length
        if bucket_size is not None and numel >= bucket_size:
            buckets.append((params, math.ceil(numel / ranks) * ranks))
            params, numel = [], 0
    if params:
        buckets.append((params, math.ceil(numel / ranks) * ranks))
    return buckets


def tensors_of(chunk, ranks, bucket_size, field):
    out = []
    for params, padded in buckets_of(chunk, ranks, bucket_size):
        values = [FIELDS[field](1000.0 * (number + 1) + i + 0.5) for number, length in params for i in range(length)]
        out.append(torch.tensor(values + [math.nan] * (padded - len(values)), dtype=torch.float32))
    return out


def state(ranks, bucket_size, dtype, stored=lambda tensors: tensors):
    # Later chunks have one bucket whatever the bucket size.
    sizes = [bucket_size if chunk == 0 else None for chunk in range(len(CHUNKS))]
    numels = [{dtype: [padded for _, padded in buckets_of(chunk, ranks, size)]} for chunk, size in enumerate(sizes)]
    chunks = {
        chunk: {dtype: {field: stored(tensors_of(chunk, ranks, size, field)) for field in FIELDS}}
        for chunk, size in enumerate(sizes)
    }
    return {"per_bucket_numel": numels, **chunks}


def older(state):
    del state["per_bucket_numel"]
    return state


def views(tensors):
    """The same tensors, each every second element of one storage, from an offset on."""
    storage = torch.full((2 * sum(len(tensor) for tensor in tensors) + 7,), math.nan)
    out, at = [], 7
    for tensor in tensors:
        view = storage[at : at + 2 * len(tensor) : 2]
        view.copy_(tensor)
        out.append(view)
        at += 2 * len(tensor)
    return out


torch.save(state(4, 16, torch.float32), "buckets.pt")
torch.save(state(4, 16, torch.float32, views), "views.pt")
torch.save(older(state(3, None, torch.bfloat16, lambda tensors: tensors[0])), "older.pt")
torch.save(older(state(4, 16, torch.float32, torch.cat)), "older_buckets.pt")

# Refused by name: small, of one chunk's first field.
small = lambda tensor: {0: {torch.float32: {"param": [tensor]}}}
torch.save(small(torch.zeros(46, dtype=torch.float16)), "half.pt")
torch.save(small(torch.zeros(23, 2)), "square.pt")
torch.save({**small(torch.zeros(46)), "buckets_coalesced": True}, "coalesced.pt")
torch.save({0: {torch.float32: {}, torch.bfloat16: {}}}, "two_types.pt")
torch.save({7: {torch.float32: {"param": [torch.zeros(1)]}}}, "other_chunk.pt")
torch.save({0: collections.Counter()}, "counter.pt")
torch.save(small(torch.zeros(46)), "protocol.pt", pickle_protocol=4)
torch.save(torch.zeros(46), "tensor.pt")
torch.save(small(torch.zeros(46)), "legacy.pt", _use_new_zipfile_serialization=False)
