"""Image decoding and augmentation.

The contract of an augmentation: for training an image data set calls

    (example, seed) -> example      seed (2,), int32: random, a function of the run's seed, the
                                    epoch and the example

and for evaluation

    example -> example

with examples {"image": ..., "label": int32 ()}, the image encoded (a scalar string: JPEG, PNG) or
decoded (height, width, channels), uint8. The result has the same keys, with an image of static
shape and a dtype that devices support. Functions of a batch (MixUp, CutMix) come after
batching:

    (batch, seeds) -> batch         seeds (batch, 2), int32, one per example

Each host has a consecutive shard of the global batch, of any even size. To give the same result
on any number of hosts, such a function may mix example j with its neighbour j XOR 1 only, and must
derive whatever the pair shares (such as the box of CutMix) from the seed of the even one.
"""
