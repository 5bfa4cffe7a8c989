"""The parts that a run adds to the loop: `proofs` of each step, `actors` with the methods that these need, `verdict`
and log of the run, and `recovery` of dead actors from `checkpoints`. The loop knows none of it.
"""
