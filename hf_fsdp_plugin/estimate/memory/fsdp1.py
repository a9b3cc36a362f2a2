"""Memory of FSDP1's units during a step: ``_runtime_utils.py`` and ``_flat_param.py`` of torch 2.13."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fsdp_plugin.estimate.memory.step import Engine, Ledger, neighbour
from hf_fsdp_plugin.estimate.unit_sizes import UnitSizes
from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan


class Fsdp1Engine(Engine):
    """The all-gather writes to the flat parameter, of which the module's parameters are views: there is no copy.

    The gradients of the views are concatenated to a flat gradient, cast to the dtype of the reduction, and reduced.
    """

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitSizes], ledger: Ledger) -> None:
        super().__init__(plan, sizes, ledger)
        self._done: set[str] = set()
        """Units whose backward is complete."""
        self._pending: tuple[str, int] | None = None
        """A unit whose gradient is not flattened yet, and the bytes of its gradients."""

    def pre_forward(self, name: str) -> None:
        self._gather(name)
        # Children run after parents, as the units began in the first forward.
        if self.plan.prefetch.forward and (successor := neighbour(["", *self.tree_order], name, 1)) is not None:
            self._gather(successor)

    def pre_backward(self, name: str) -> None:
        self._gather(name)
        if self.plan.prefetch.backward == "pre":
            self._prefetch_backward(name)

    def post_backward(self, name: str, grads: int) -> None:
        """Complete a unit. With forward prefetch, its views are older than the operators of the unit before it.

        Autograd runs the newest node first, so the gradient is flattened only after the backward of that unit.
        """
        self._complete_pending()
        if self.plan.prefetch.forward and name:
            self._pending = (name, grads)
        else:
            self._complete(name, grads)

    def _complete_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._complete(*pending)

    def _complete(self, name: str, grads: int) -> None:
        sizes, ledger = self.sizes[name], self.ledger
        flat = sizes.flat_grad if grads else 0
        ledger.add("grads", flat)  # split_with_sizes_backward concatenates the gradients of the views
        ledger.free("grads", grads)
        added = 0
        if name in self.accumulated and grads:
            # Autograd adds it in place, and keeps it until the hook that reduces has returned.
            added, flat = flat, self.accumulated.pop(name)
        if self.syncs or sizes.reshards or not self.is_sharded:
            self.release(name)
        self._done.add(name)
        if self.plan.prefetch.backward == "post":
            self._prefetch_backward(name)
        if not self.syncs:
            if flat:
                self.accumulated[name] = flat
        elif flat:
            self._reduce(name, flat)
        ledger.free("grads", added)

    def end_backward(self) -> None:
        self._complete_pending()
        super().end_backward()
        self._done.clear()
        if self.offloads:
            self.ledger.free("grads", sum(self.sizes[name].grad_shard for name in self.reduced))
            self.reduced.clear()
            for name in filter(self._keeps_copy, list(self.gathered)):
                super().release(name)

    def keep_reduced(self, name: str) -> None:
        """With offload, too, the device keeps the gradient until the end of backward (``_saved_grad_shard``)."""
        if self.offloads:
            self.reduced.add(name)
        else:
            super().keep_reduced(name)

    def _prefetch_backward(self, name: str) -> None:
        target = neighbour(self.order, name, -1)
        if target is not None and target not in self._done:
            self._gather(target)

    def _gather(self, name: str) -> None:
        sizes = self.sizes[name]
        if name in self.gathered or not sizes.gathered:
            return
        source = sizes.compute_shard or (sizes.params if self.offloads and not self._keeps_copy(name) else 0)
        self.ledger.add("gathered", source)
        self.ledger.add("gathered", sizes.gathered)
        if self.is_sharded:
            self.copy_of_collective(sizes.gathered)
        if not self._keeps_source(name):
            self.ledger.free("gathered", source)
        self.gathered.add(name)

    def release(self, name: str) -> None:
        if self._keeps_copy(name):
            return
        if name in self.gathered and self._keeps_source(name):
            self.ledger.free("gathered", self.sizes[name].params)
        super().release(name)

    def _keeps_copy(self, name: str) -> bool:
        """Whether autograd keeps the copy of a whole offloaded parameter, which nothing frees before it does."""
        return self.offloads and not self.is_sharded and self.sizes[name].gathered == self.sizes[name].params

    def _keeps_source(self, name: str) -> bool:
        """Whether the original parameters are views of the offloaded shard's copy on the device (``flat_param_to``)."""
        return self.offloads and self.is_sharded and self.plan.use_orig and not self.sizes[name].compute_shard

    def _reduce(self, name: str, flat: int) -> None:
        """Cast, reduce-scatter and cast back (``_post_backward_hook``, ``_reduce_grad``)."""
        sizes, ledger = self.sizes[name], self.ledger
        cast = sizes.reduce_input if sizes.reduce_input != flat else 0
        ledger.add("gathered", cast)
        if self.is_sharded:
            ledger.add("gathered", sizes.reduce_output)
            self.copy_of_collective(sizes.reduce_input)
            ledger.free("gathered", sizes.reduce_output)
            ledger.add("grads", sizes.grad_shard)
        ledger.free("gathered", cast)
        ledger.free("grads", flat)
        if not self.is_sharded:
            ledger.add("grads", sizes.grad_shard)
        self.keep_reduced(name)
