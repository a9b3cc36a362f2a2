"""Memory of the units during a step under both FSDP versions, as torch's sources allocate and free it."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fsdp_plugin.plan.fsdp_plan import FsdpPlan
from hf_fsdp_plugin.tools.plan.estimate.memory.step import Engine, Ledger, Stage, Usage, neighbour
from hf_fsdp_plugin.tools.plan.estimate.unit_bytes import UnitBytes
from hf_fsdp_plugin.torch_private.fsdp2 import is_since_2_15


class Fsdp1Engine(Engine):
    """FSDP1: ``_runtime_utils.py`` and ``_flat_param.py`` of torch 2.13.

    The all-gather writes to the flat parameter, of which the module's parameters are views: there is no copy.

    The gradients of the views are concatenated to a flat gradient, cast to the dtype of the reduction, and reduced.
    """

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitBytes], ledger: Ledger) -> None:
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

    def post_backward(self, name: str, grads: int, *, at_end: bool) -> None:
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


class Fsdp2Engine(Engine):
    """FSDP2: ``torch/distributed/fsdp/_fully_shard/`` of torch 2.13 and 2.15.

    What the versions do differently follows :data:`hf_fsdp_plugin.torch_private.fsdp2.SINCE_2_15`.

    An all-gather has an output buffer, from which the parameters are copied into tensors of their own.

    In forward, the buffer is kept until the next unit's parameters are copied too (``all_gather_state``, to which
    ``FSDPParamGroup.wait_for_unshard`` refers until it returns); in backward, it is freed after the copy. The input
    buffer of a reduce-scatter is kept until the next unit's reduce-scatter (``reduce_scatter_states``).
    """

    def __init__(self, plan: FsdpPlan, sizes: Sequence[UnitBytes], ledger: Ledger) -> None:
        super().__init__(plan, sizes, ledger)
        self._accumulates_in_place = is_since_2_15()
        self._in_backward: list[str] = []
        """Units whose backward has begun, the last one last."""
        self._adds_in_place = False
        """Whether autograd adds the gradients of this backward to those of earlier ones."""
        self._buffered: set[str] = set()
        """Units whose all-gather was started."""
        self._held = 0
        """Bytes of the all-gather buffer that the forward keeps."""
        self._reduce_input = 0
        self._all_reduced = 0
        """Bytes of all-reduced buffers that are kept until the end of backward, apart from the gradients."""
        self._partial: dict[str, int] = {}
        """Unit -> bytes of the gradients that are not reduced over the replicas yet."""

    def pre_forward(self, name: str) -> None:
        if name in self._in_backward:  # a recomputation: ``FSDPState._pre_forward`` returns
            return
        if name not in self.gathered:
            self._start(name)
            previous, self._held = self._held, 0
            self._copy_out(name, keep_buffer=True)
            self.ledger.free("gathered", previous)
        if self.plan.prefetch.forward and (successor := neighbour(self.tree_order, name, 1)) is not None:
            self._start(successor)

    def end_forward(self) -> None:
        # Gradients in the dtype of the reduction stay where autograd adds to them.
        casts = any(unit.flat_grad and unit.reduce_input != unit.flat_grad for unit in self.sizes.values())
        self._adds_in_place = bool(self.accumulated) and (self._accumulates_in_place or not casts)
        self.ledger.free("gathered", self._held)
        self._held = 0

    def run_operators(self, stage: Stage) -> None:
        """Run the operators of a stage.

        Where autograd accumulates, it frees each gradient that it adds to one of earlier micro-batches, and keeps the
        gradients of the first micro-batch in the dtype of the reduction.
        """
        if self._adds_in_place:
            self.ledger.run(Usage(stage.most_activations), Usage(stage.end.activations))
        elif self._accumulates_in_place and not self.syncs and self._in_backward:
            kept = _in_reduce_dtype(self.sizes[self._in_backward[-1]], stage.peak.grads)
            self.ledger.run(Usage(stage.peak.activations, kept), stage.end)
        else:
            super().run_operators(stage)

    def pre_backward(self, name: str) -> None:
        self._in_backward.append(name)
        if name not in self.gathered:
            self._start(name)
            self._copy_out(name, keep_buffer=False)
        if self.plan.prefetch.backward == "pre" and (target := neighbour(self.order, name, -1)) is not None:
            self._start(target)

    def post_backward(self, name: str, grads: int, *, at_end: bool) -> None:
        if name in self._in_backward:
            self._in_backward.remove(name)
        if self._adds_in_place:
            self._add_new_gradient(name)
            grads = 0
        target = neighbour(self.tree_order, name, -1)
        if self.plan.prefetch.backward == "post" and target is not None and not at_end:
            self._start(target)
        if not self.syncs:
            self.release(name)
            self._accumulate(name, grads)
            return
        whole, accumulated = grads, name in self.accumulated
        if accumulated:
            if not self._adds_in_place:
                self._add_to_accumulated(name, grads)
            whole = self.accumulated.pop(name)
        self.release(name)
        if self._reduce_input:
            self.ledger.free("gathered", self._reduce_input)
            self._reduce_input = 0
        if whole:
            self._reduce(name, whole, accumulated=accumulated)

    def end_backward(self) -> None:
        super().end_backward()
        self.ledger.free("gathered", self._reduce_input + self._all_reduced)
        self._reduce_input = self._all_reduced = 0
        for name in list(self._buffered):  # an all-gather that no unit needed
            self._free_buffer(name)

    def _start(self, name: str) -> None:
        """Allocate the buffer of an all-gather, and until it has started its input (``foreach_all_gather``)."""
        sizes = self.sizes[name]
        if name in self.gathered or name in self._buffered or not sizes.shards or sizes.num_shards == 1:
            return
        source = sizes.compute_shard or (sizes.params if self.offloads else 0)
        self.ledger.add("gathered", source)
        self.ledger.add("gathered", sizes.gathered)
        self.copy_of_collective(sizes.gathered)
        self.ledger.free("gathered", source)
        self._buffered.add(name)

    def _copy_out(self, name: str, *, keep_buffer: bool) -> None:
        sizes = self.sizes[name]
        if not sizes.shards:
            return
        self.ledger.add("gathered", sizes.gathered)
        self.gathered.add(name)
        if self.offloads and sizes.num_shards == 1:  # one parameter after the other is copied to the device
            copied = max(shard.numel * shard.dtype.itemsize for shard in sizes.shards)
            self.ledger.use("gathered", copied)
        if name in self._buffered and keep_buffer:
            self._buffered.remove(name)
            self._held = sizes.gathered
        elif name in self._buffered:
            self._free_buffer(name)

    def _free_buffer(self, name: str) -> None:
        self._buffered.remove(name)
        self.ledger.free("gathered", self.sizes[name].gathered)

    def _accumulate(self, name: str, grads: int) -> None:
        """Keep whole gradients in the dtype of the reduction.

        ``to_accumulated_grad_if_needed`` casts them after the backward of the unit, autograd each one at once.
        """
        if not grads:
            return
        if name in self.accumulated:
            self._add_to_accumulated(name, grads)
            return
        sizes = self.sizes[name]
        kept = _in_reduce_dtype(sizes, grads)
        if kept != grads:
            also_kept = sizes.last_grad if self._accumulates_in_place else grads
            self.ledger.add("grads", kept - grads + also_kept)
            self.ledger.free("grads", also_kept)
        self.accumulated[name] = kept

    def _add_new_gradient(self, name: str) -> None:
        """Add one new gradient in place: on the CPU, its copy in the dtype of the sum is needed besides."""
        if self.plan.device_type == "cpu" and name in self.accumulated:
            new = self.sizes[name].largest_grad
            copy = _in_reduce_dtype(self.sizes[name], new)
            if copy != new:
                self.ledger.use("grads", new + copy)

    def _add_to_accumulated(self, name: str, grads: int) -> None:
        """Add new gradients in place. On the CPU, an addition of two dtypes casts the new gradient first."""
        sizes = self.sizes[name]
        if self.plan.device_type == "cpu" and self.accumulated[name] != grads:
            copy = _in_reduce_dtype(sizes, sizes.largest_grad)
            self.ledger.use("grads", copy)
        self.ledger.free("grads", grads)

    def _reduce(self, name: str, whole: int, *, accumulated: bool) -> None:
        """Reduce-scatter and all-reduce (``foreach_reduce``).

        Args:
            whole: bytes of the gradients, which have one dtype if they were accumulated.
        """
        sizes, ledger = self.sizes[name], self.ledger
        keeps_last = sizes.num_shards > 1 and not self._accumulates_in_place
        last = whole * sizes.last_grad // sizes.whole_grads if keeps_last else 0
        ledger.add("gathered", sizes.reduce_input)
        self._reduce_input = sizes.reduce_input
        if self.plan.device_type == "cpu" and not accumulated:
            ledger.use("grads", sizes.cast_grads)
        ledger.free("grads", whole - last)
        ledger.add("gathered", sizes.reduce_output)
        if sizes.num_shards > 1:
            self.copy_of_collective(sizes.reduce_input)
        ledger.free("gathered", sizes.reduce_output)
        if not self.all_reduces:
            if name not in self._partial:  # later ones are added to the first (``_partial_reduce_output``)
                ledger.add("grads", sizes.reduce_output)
                self._partial[name] = sizes.reduce_output
            ledger.free("grads", last)
            return
        if sizes.reduce_output == sizes.grad_shard:
            ledger.add("grads", sizes.grad_shard)
        else:
            ledger.add("gathered", sizes.reduce_output)
            ledger.add("grads", sizes.grad_shard)
            if self.plan.mesh.replicate > 1:
                self._all_reduced += sizes.reduce_output
            else:
                ledger.free("gathered", sizes.reduce_output)
        ledger.free("grads", last + self._partial.pop(name, 0))
        is_copied = self.offloads or name in self.reduced
        self.keep_reduced(name)
        if is_copied and self.plan.mesh.replicate > 1 and sizes.reduce_output == sizes.grad_shard:
            # Offload copies the all-reduced buffer, and a gradient of an earlier micro-batch gets it added; the buffer
            # is kept until the end of backward (``_all_reduce_state``).
            ledger.add("gathered", sizes.reduce_output)
            self._all_reduced += sizes.reduce_output


def _in_reduce_dtype(sizes: UnitBytes, grads: int) -> int:
    """Return the bytes of whole gradients after a cast to the dtype of the reduction."""
    return grads * sizes.reduce_input // sizes.flat_grad if sizes.flat_grad else grads
