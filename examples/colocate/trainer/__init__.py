"""A trainer with FSDP2 whose memory can be paused; the module `trainer` is the place to start reading.

trainer: FSDP2 with mixed precision, supervised and policy-gradient steps. interface: types of its arguments and
results. batch: samples packed into rows. causal_lm: the forward pass. weights: written into engines. trainer_memory:
regions.
"""
