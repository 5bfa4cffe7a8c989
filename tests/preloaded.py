"""The last module that a process imports before tests fork the process. The module loads torch, and excludes torch's
objects from garbage collections: a collection in a forked process would copy the pages of these objects.
"""

import gc

import torch._dynamo  # which the first step of an optimizer imports, for 1.5 s  # noqa: F401

gc.collect()
gc.freeze()
