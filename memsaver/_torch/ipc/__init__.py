"""Tensors of regions in torch.multiprocessing: the receiver maps the owner's chunks, without a copy.

- ``handle``: the bytes that torch sends in the place of CUDA's own handle.
- ``sent``: the storages that this process has sent.
- ``server``: lends their chunks to receivers, as a service of memsaver/broker/server.py.
- ``receiver``: the storages that this process has received.
- ``patches``: the functions of torch that call all of these.
"""
