"""Tensors of regions in torch.multiprocessing: the receiver maps the owner's chunks, without a copy."""
