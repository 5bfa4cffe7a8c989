"""The guest of memory that is registered with a library, such as one for RDMA."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from memsaver._guests import Guest

log = logging.getLogger("memsaver")


class Registrations(Guest):
    """Deregisters tensors before a pause, and registers them again after a resume.

    A network card maps the physical memory of registered tensors, and a pause releases this memory. The addresses stay
    the same; keys of the library do not. ``register`` returns the value that ``deregister`` needs, such as a
    handle, and can send new keys to other hosts.

    Args:
        tags: As for ``memsaver.Guest``: the tags of the regions that hold the memory.
        memory: The objects to register, by a name of your choice, such as tensors of a KV cache.
        register: Called with a name and its memory. The memory is registered now by the constructor, and after each
            resume. Its results are kept.
        deregister: Called with a name and the result of ``register``.
        name: As for ``memsaver.Guest``.
        order: As for ``memsaver.Guest``.

    Raises:
        Exception: ``register`` raised it. The memory that was registered before has been deregistered.

    Examples:
        >>> class Connector:  # such as one of a KV cache over RDMA
        ...     def register(self, layer, tensor):
        ...         print("register", layer, tensor.nbytes)
        ...         return layer.upper()
        ...     def deregister(self, layer, handle):
        ...         print("deregister", handle)
        >>> connector = Connector()
        >>> kv = memsaver.region("kv_cache", device="cpu")
        >>> layers = {"layer0": kv.empty((1024,), torch.uint8)}
        >>> guest = memsaver.guests.Registrations(
        ...     "kv_cache", layers, register=connector.register, deregister=connector.deregister
        ... )
        register layer0 1024
        >>> memsaver.register(guest)
        >>> done = kv.pause()
        deregister LAYER0
        >>> done = kv.resume()
        register layer0 1024
        >>> memsaver.unregister(guest)
    """

    def __init__(
        self,
        tags: str | Iterable[str],
        memory: Mapping[str, Any],
        *,
        register: Callable[[str, Any], Any],
        deregister: Callable[[str, Any], object],
        name: str = "registered memory",
        order: int = 0,
    ) -> None:
        super().__init__(name, tags, order=order)
        for option, call in (("register", register), ("deregister", deregister)):
            if not callable(call):
                raise TypeError(f"{option} is {call!r}, expected something to call")
        self._memory = dict(memory)
        self._register, self._deregister = register, deregister
        self._results: dict[str, Any] = {}
        try:
            self.come_back()
        except BaseException:
            self.leave()
            raise

    @property
    def registered(self) -> dict[str, Any]:
        """By name, the results of ``register``, of the memory that is registered now."""
        return dict(self._results)

    def leave(self) -> None:
        """Deregisters the memory, beginning with the last one.

        Raises:
            Exception: ``deregister`` raised it. The memory that was deregistered before is registered again.
        """
        try:
            for each in reversed(list(self._results)):
                self._deregister(each, self._results[each])
                del self._results[each]
        except BaseException:
            try:
                self.come_back()
            except Exception as error:
                log.error("memory stays deregistered until another pause and a resume: %s", error)
            raise

    def come_back(self) -> None:
        """Registers the memory that is not registered. A repeated call continues.

        Raises:
            Exception: ``register`` raised it.
        """
        for each, held in self._memory.items():
            if each not in self._results:
                self._results[each] = self._register(each, held)
