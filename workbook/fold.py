"""Derived weights that stay fresh.

A fold is computed once from parameters and used until one of them changes. Nobody is told when a
parameter changes, so each lookup compares stamps: the tensor object itself (by weak reference),
storage, data pointer, version counter, shape, stride, dtype and device, and a global epoch that
moves with every optimizer step, because fused optimizers write without moving the version counter.
Folds of memory shared between processes are not kept: another process moves no counter here.

One change stays hidden: an edit in place through `.data` or a numpy view. After it, call `refresh`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["FoldCache", "freeze", "refresh"]

Folded = tuple[Tensor, ...]


class _Epoch:
    """Counts the optimizer steps of this process."""

    value = 0


def _after_step(optimizer: object, args: object, kwargs: object) -> None:
    _Epoch.value += 1


register_optimizer_step_post_hook(_after_step)


def _stamp(tensor: Tensor) -> tuple:
    return (
        tensor.data_ptr(),
        tensor.untyped_storage()._cdata,
        tensor._version,
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.device,
    )


@dataclass
class _Held:
    alive: tuple[weakref.ref, ...]
    # Held so that no later storage gets the same address: after `p.data = a; p.data = b` the data
    # pointer may be the old one, and assigning `.data` moves no version counter.
    storages: tuple[StorageWeakRef, ...]
    stamps: tuple[tuple, ...]
    epoch: int
    folded: Folded
    stream: int = 0  # the raw stream that made the fold
    event: torch.cuda.Event | None = None
    waited: set[int] = field(default_factory=set)

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        for ref, tensor in zip(self.alive, tensors, strict=True):
            if ref() is not tensor:
                return False
        return True

    def is_fresh(self, tensors: Sequence[Tensor]) -> bool:
        return self.epoch == _Epoch.value and self.stamps == tuple([_stamp(t) for t in tensors])


class FoldCache:
    """Folds by recipe and parameters; an entry lives no longer than its parameters."""

    caches: weakref.WeakSet[FoldCache] = weakref.WeakSet()

    def __init__(self) -> None:
        self._entries: dict[tuple, _Held] = {}
        FoldCache.caches.add(self)

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, recipe: object, tensors: Sequence[Tensor], make: Callable[[], Folded]) -> Folded:
        """The fold of `tensors`, made by `make()` unless a fresh one is there.

        Inference tensors have no version counter: their folds are not kept. While a CUDA graph
        is captured the fold is captured with it, unless the parameters are frozen.
        """
        key = (recipe, *map(id, tensors))
        entry = self._entries.get(key)
        where = tensors[0]
        capturing = _is_capturing(where)
        if entry is not None and entry.is_of(tensors):
            if _frozen and where in _frozen:
                return entry.folded if capturing else self._ordered(entry, where)
            if not capturing and entry.is_fresh(tensors):
                return self._ordered(entry, where)
        if capturing:
            return _made(make)
        del entry  # what is stale goes first: the new fold may take its memory
        self._entries.pop(key, None)
        if any(t.is_inference() for t in tensors):
            return _made(make)
        return self._keep(key, tensors, make)

    def drop(self, tensors: Sequence[Tensor]) -> None:
        """Forget every fold that one of these tensors is part of."""
        ids = {id(t) for t in tensors}
        for key in [key for key in list(self._entries) if ids & set(key[1:])]:
            self._entries.pop(key, None)

    def _keep(self, key: tuple, tensors: Sequence[Tensor], make: Callable[[], Folded]) -> Folded:
        entries = self._entries
        # Read before folding: weights that another thread changes meanwhile are folded again.
        stamps, epoch = tuple(map(_stamp, tensors)), _Epoch.value
        folded = _made(make)
        if tensors[0] not in _frozen and any(map(_is_shared, tensors)):
            return folded

        def forget(_: object) -> None:
            entries.pop(key, None)

        alive = tuple(weakref.ref(t, forget) for t in tensors)
        storages = tuple(StorageWeakRef(t.untyped_storage()) for t in tensors)
        entry = _Held(alive, storages, stamps, epoch, folded)
        if tensors[0].is_cuda:
            entry.stream = _raw_stream(tensors[0])
            entry.event = torch.cuda.Event()
            entry.event.record(torch.cuda.current_stream(tensors[0].device))
            entry.waited.add(entry.stream)
        entries[key] = entry
        return folded

    def _ordered(self, held: _Held, where: Tensor) -> Folded:
        """The fold, ready for use on the current stream: made on another one, it is waited for.

        Not under capture, which may not wait for an event from outside; torch.cuda.graph has
        synchronised before it began.
        """
        if held.event is not None and (raw := _raw_stream(where)) not in held.waited:
            stream = torch.cuda.current_stream(where.device)
            stream.wait_event(held.event)
            for tensor in held.folded:
                tensor.record_stream(stream)
            held.waited.add(raw)
        return held.folded


class _Frozen:
    """Parameters whose folds are not compared any more, by identity."""

    def __init__(self) -> None:
        self._refs: dict[int, weakref.ref] = {}

    def __bool__(self) -> bool:
        return bool(self._refs)

    def __contains__(self, tensor: Tensor) -> bool:
        ref = self._refs.get(id(tensor))
        return ref is not None and ref() is tensor

    def add(self, tensor: Tensor) -> None:
        refs, key = self._refs, id(tensor)
        refs[key] = weakref.ref(tensor, lambda _: refs.pop(key, None))

    def discard(self, tensor: Tensor) -> None:
        if tensor in self:
            self._refs.pop(id(tensor), None)


_frozen = _Frozen()


def _made(make: Callable[[], Folded]) -> Folded:
    with torch.no_grad():
        return make()


def _raw_stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def _is_shared(tensor: Tensor) -> bool:
    """True for CPU memory that other processes may write."""
    return not tensor.is_cuda and tensor.is_shared()


def _is_capturing(tensor: Tensor) -> bool:
    return tensor.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def refresh(module: nn.Module) -> None:
    """Drop the folds of a module's parameters and buffers, frozen or not; the next call folds.

    Needed after an edit in place through `.data` (`p.data.mul_(2)`) or a numpy view, the one change
    that torch hides: it moves neither the version counter nor the data pointer. Else harmless.
    """
    tensors = _tensors(module)
    for tensor in tensors:
        _frozen.discard(tensor)
    for cache in list(FoldCache.caches):
        cache.drop(tensors)


def freeze(module: nn.Module) -> None:
    """Promise that the weights stay as they are: folds are kept without comparing stamps.

    A CUDA graph captured from a frozen module replays without folding; the fold has to be there
    before the capture, so call the module once after `freeze`. `refresh` ends it.
    """
    refresh(module)  # a fold from before the last change must not become the frozen one
    for tensor in _tensors(module):
        _frozen.add(tensor)
