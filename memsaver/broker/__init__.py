"""The broker: one process for each device, which owns the chunks of a shared pool and lends them to its clients."""
