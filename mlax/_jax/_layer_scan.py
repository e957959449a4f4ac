"""A scan over layers whose residuals are written into their stacks where they are computed."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import eval_jaxpr
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import DropVar, Literal, Primitive, Var
from jax.interpreters import ad, batching, mlir

from mlax._jax._layer_form import use_layer_forms
from mlax._jax._memory import is_on_host
from mlax._jax._residuals import Residuals, find_residual_products


def prefers_layer_scan(*trees: Any) -> bool:
    """Whether `layer_scan` is the faster form: in programs of one GPU, with stacks that XLA cannot shard."""
    if jax.default_backend() != "gpu" or jax.__version_info__ < (0, 11) or jax.device_count() > 1:
        return False
    types = [(leaf, jax.typeof(leaf)) for leaf in jax.tree.leaves(trees)]
    return all(
        aval.sharding.mesh.empty and not is_on_host(leaf) and all(isinstance(size, int) for size in aval.shape)
        for leaf, aval in types
    )


def layer_scan(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, xs: Any, *, length: int) -> tuple[Any, Any]:
    """`lax.scan` whose forward pass writes each residual into its stack at once, and reads it from there.

    XLA's GPU compiler lets a matrix product or a kernel of ours write into, and read from, a slice of a stack, if
    nothing but the stack takes its result. In JAX's derivative of a scan a residual is both stored and used: XLA
    copies it into the stack, or computes it twice. Here whatever uses a residual reads the stack, which is allocated
    but not filled with zeros, and an array and its reshaped form are stored once. A function that `with_layer_form` has
    given a second form is computed by it.

    It has the values and all derivatives of `lax.scan`.
    """
    flat, tree = jax.tree.flatten((carry, xs))
    counts = (len(jax.tree.leaves(carry)), len(jax.tree.leaves(xs)))
    out_tree: Any = None

    def flat_step(*flat: Any) -> list[Any]:
        nonlocal out_tree
        outputs, out_tree = jax.tree.flatten(step(*tree.unflatten(flat)))
        return outputs

    closed = jax.make_jaxpr(flat_step)(*_step_types(flat, counts[0]))
    is_promoted = any(a.dtype != b.dtype for a, b in zip(closed.in_avals, closed.out_avals[: counts[0]], strict=False))
    if closed.effects or length == 0 or is_promoted:  # a carry of a weak type, say, which lax.scan promotes
        return lax.scan(step, carry, xs, length=length)
    run = _differentiable_scan(closed.jaxpr, counts, length)
    return out_tree.unflatten(run(*flat, *closed.consts))


def _step_types(flat: Sequence[Any], carried: int) -> list[jax.ShapeDtypeStruct]:
    """The types of what a step gets: the carry as it is, and a slice of each of xs."""
    types = [jax.typeof(leaf) for leaf in flat]
    shapes = [aval.shape if index < carried else aval.shape[1:] for index, aval in enumerate(types)]
    return [jax.ShapeDtypeStruct(shape, a.dtype, weak_type=a.weak_type) for shape, a in zip(shapes, types, strict=True)]


def _differentiable_scan(jaxpr: Any, counts: tuple[int, int], length: int) -> Callable[..., list[Any]]:
    """The scan of a jaxpr from (*carry, *x) to (*carry, *y), as a function of (*carry, *xs, *consts)."""
    carried, inputs = counts[0], sum(counts)

    def step(*values: Any) -> list[Any]:
        return eval_jaxpr(jaxpr, list(values[inputs:]), *values[:inputs])

    @jax.custom_jvp
    def run(*values: Any) -> list[Any]:
        # a loop over stacks, as in the rule below, not a scan: where a scan of it is batched, JAX gives the results of
        # the rule the batch axes that those of the function have
        def body(index: Any, state: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            carry, ys = state
            x = [_read(leaf, index) for leaf in values[carried:inputs]]
            outputs = step(*carry, *x, *values[inputs:])
            pairs = zip(ys, outputs[carried:], strict=True)
            return outputs[:carried], [lax.dynamic_update_index_in_dim(stack, y, index, 0) for stack, y in pairs]

        empty = [lax.empty((length, *out.aval.shape), out.aval.dtype) for out in jaxpr.outvars[carried:]]
        carry, ys = lax.fori_loop(0, length, body, (list(values[:carried]), empty))
        return [*carry, *ys]

    @functools.partial(run.defjvp, symbolic_zeros=True)
    def _(values: tuple[Any, ...], dots: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        # the tangent of the carry becomes nonzero in the loop, if it is not from the beginning
        is_live = [
            _is_inexact(value) and (index < carried or not isinstance(dot, SymbolicZero))
            for index, (value, dot) in enumerate(zip(values, dots, strict=True))
        ]
        linearized = _LinearizedStep.trace(step, values, is_live, counts)
        outputs, residuals = linearized.scan(values, length)
        live_dots = list(map(_instantiate, _select(dots, is_live), _select(values, is_live)))
        changes = iter(linearized.push(residuals, live_dots, length))
        return outputs, [next(changes) if _is_inexact(y) else np.zeros(y.shape, jax.dtypes.float0) for y in outputs]

    return run


@dataclasses.dataclass(frozen=True)
class _LinearizedStep:
    """A step that returns its residuals, too, and its tangent, as a function of the residuals."""

    jaxpr: Any  # of (*carry, *x, *consts) to (*carry, *y, *residuals)
    consts: list[Any]  # of the jaxpr
    push_tree: Any  # of the tangent, a pytree of the residuals
    is_live: list[bool]  # of each input: whether it has a tangent
    counts: tuple[int, int]  # leaves of the carry and of x
    outputs: int  # leaves of the carry and of y

    @classmethod
    def trace(
        cls, step: Callable[..., list[Any]], values: Sequence[Any], is_live: list[bool], counts: tuple[int, int]
    ) -> "_LinearizedStep":
        outputs, push_tree = 0, None

        def linearize(*values: Any) -> tuple[list[Any], list[Any]]:
            nonlocal outputs, push_tree
            function = functools.partial(_call_live, step, values, is_live)
            floats, push, rest = jax.linearize(function, *_select(values, is_live), has_aux=True)
            residuals, push_tree = jax.tree.flatten(push)
            found = [b if a is None else a for a, b in zip(floats, rest, strict=True)]
            outputs = len(found)
            return found, residuals

        inputs = sum(counts)
        closed = jax.make_jaxpr(linearize)(*_step_types(values[:inputs], counts[0]), *values[inputs:])
        stored = Residuals(closed.jaxpr, closed.jaxpr.outvars[outputs:], counts[0]).origins
        jaxpr = use_layer_forms(closed.jaxpr, stored)
        return cls(jaxpr, list(closed.consts), push_tree, is_live, counts, outputs)

    @functools.cached_property
    def residuals(self) -> Residuals:
        return Residuals(self.jaxpr, self.jaxpr.outvars[self.outputs :], self.counts[0])

    def scan(self, values: Sequence[Any], length: int) -> tuple[list[Any], dict[Any, Any]]:
        """The outputs of the scan, and each variable that is needed: a stack, one of xs, or a constant.

        The stack of a carry has one more entry: a step reads its own, and writes that of the next one.
        """
        carried, inputs, residuals = self.counts[0], sum(self.counts), self.residuals
        products = find_residual_products(self.jaxpr)

        def body(index: Any, state: tuple[list[Any], list[Any], list[Any]]) -> tuple[list[Any], list[Any], list[Any]]:
            carry, ys, stacks = state
            stack_of = dict(zip(residuals.stored, stacks, strict=True))
            given = {atom: _read(stack_of[atom], index) for atom in residuals.stored_carry.values()}

            def store(atom: Any, value: Any) -> Any:
                if atom not in stack_of or atom in given:
                    return lax.optimization_barrier(value) if atom in products else value
                is_copied = atom in residuals.copied
                # behind a barrier, or XLA would compute it a second time, into the stack
                update = lax.optimization_barrier(value) if is_copied else value
                stack_of[atom] = lax.dynamic_update_index_in_dim(stack_of[atom], update, index, 0)
                return value if is_copied else _read(stack_of[atom], index)

            x = [_read(leaf, index) for leaf in values[carried:inputs]]
            starts = [given.get(atom, value) for atom, value in zip(self.jaxpr.invars, carry, strict=False)]
            found = _evaluate(self.jaxpr, self.consts, [*starts, *x, *values[inputs:]], store)
            for place, atom in residuals.stored_carry.items():
                stack_of[atom] = lax.dynamic_update_index_in_dim(stack_of[atom], found[place], index + 1, 0)
            pairs = zip(ys, found[carried : self.outputs], strict=True)
            ys = [lax.dynamic_update_index_in_dim(stack, y, index, 0) for stack, y in pairs]
            carry = [None if place in residuals.stored_carry else each for place, each in enumerate(found[:carried])]
            return carry, ys, [stack_of[atom] for atom in residuals.stored]

        ys = [
            lax.empty((length, *atom.aval.shape), atom.aval.dtype)
            for atom in self.jaxpr.outvars[carried : self.outputs]
        ]
        firsts = {atom: values[place] for place, atom in residuals.stored_carry.items()}
        stacks = [_empty_stack(atom.aval, length, firsts.get(atom)) for atom in residuals.stored]
        start = [None if place in residuals.stored_carry else each for place, each in enumerate(values[:carried])]
        carry, ys, stacks = lax.fori_loop(0, length, body, (start, ys, stacks))
        stack_of = dict(zip(residuals.stored, stacks, strict=True))
        lasts = {place: stack_of[atom][length] for place, atom in residuals.stored_carry.items()}
        given = zip(
            (*self.jaxpr.constvars, *self.jaxpr.invars[carried:]), (*self.consts, *values[carried:]), strict=True
        )
        return [*[lasts.get(place, each) for place, each in enumerate(carry)], *ys], {**dict(given), **stack_of}

    def push(self, residuals: dict[Any, Any], dots: list[Any], length: int) -> list[Any]:
        """The tangents of the outputs, for those of the live inputs."""
        carried, inputs = self.counts[0], sum(self.counts)
        with_axis = {*self.residuals.stored, *self.jaxpr.invars[carried:inputs]}
        atoms = sorted(self.residuals.needed, key=lambda atom: atom not in with_axis)

        def push_one(residuals: list[Any], *dots: Any) -> list[Any]:
            env = dict(zip(atoms, residuals, strict=True))
            push = self.push_tree.unflatten(self.residuals.compute(env))
            return [change for change in push(*dots) if change is not None]

        scanned = sum(atom in with_axis for atom in atoms)
        live = (sum(self.is_live[:carried]), sum(self.is_live[carried:inputs]))
        scan = _LinearScan(push_one, (scanned, len(atoms) - scanned, *live), length)
        return scan.bind([residuals[atom] for atom in atoms], dots)


class _LinearScan(NamedTuple):
    """The scan of a function that is linear in the tangents of the carry, of x and of constants."""

    push: Callable[..., list[Any]]  # of (residuals, *dots) to the tangents of the carry and of y
    counts: tuple[int, int, int, int]  # residuals with and without an axis of layers; tangents of the carry and of x
    length: int

    def bind(self, residuals: list[Any], dots: list[Any]) -> list[Any]:
        return _linear_scan.bind(*residuals, *dots, scan=self, jaxpr=jax.make_jaxpr(self.apply)(*residuals, *dots))

    def apply(self, *values: Any) -> list[Any]:
        stacks, fixed, dcarry, dxs, dconsts = self.split(values)

        def body(dcarry: list[Any], now: tuple[list[Any], list[Any]]) -> tuple[list[Any], list[Any]]:
            changes = self.push([*now[0], *fixed], *dcarry, *now[1], *dconsts)
            return changes[: len(dcarry)], changes[len(dcarry) :]

        stacks = [stack[: self.length] for stack in stacks]  # without the last entry of a carry
        dcarry, dys = lax.scan(body, dcarry, (stacks, dxs), length=self.length)
        return [*dcarry, *dys]

    def transpose(self, residuals: list[Any], types: list[Any], cotangents: list[Any]) -> list[Any]:
        """The cotangents of the carry, of xs and of constants, of these types, for those of the carry and of ys."""
        stacks, fixed, carry, xs, consts = self.split([*residuals, *types])
        slices = [jax.ShapeDtypeStruct(each.shape[1:], each.dtype) for each in xs]
        split = len(carry) + len(xs)

        def body(done: Any, state: tuple[list[Any], list[Any], list[Any]]) -> tuple[list[Any], list[Any], list[Any]]:
            grads, sums, x_grads = state
            index = self.length - 1 - done
            push = functools.partial(self.push, [*[_read(stack, index) for stack in stacks], *fixed])
            dys = [_read(stack, index) for stack in cotangents[len(carry) :]]
            found = jax.linear_transpose(push, *carry, *slices, *consts)([*grads, *dys])
            # behind a barrier, or a product that writes into its stack is neither autotuned nor has a workspace
            apart = [lax.optimization_barrier(grad) if grad.ndim > 1 else grad for grad in found[len(carry) : split]]
            pairs = zip(x_grads, apart, strict=True)
            x_grads = [lax.dynamic_update_index_in_dim(stack, grad, index, 0) for stack, grad in pairs]
            return list(found[: len(carry)]), list(map(lax.add, sums, found[split:])), x_grads

        start = (cotangents[: len(carry)], [jnp.zeros(each.shape, each.dtype) for each in consts])
        empty = [lax.empty(each.shape, each.dtype) for each in xs]
        grads, sums, x_grads = lax.fori_loop(0, self.length, body, (*start, empty))
        return [*grads, *x_grads, *sums]

    def split(self, values: Sequence[Any]) -> list[list[Any]]:
        """Residuals with and without an axis of layers, and tangents of the carry, of xs and of constants."""
        ends = itertools.accumulate(self.counts)
        return [list(values[start:end]) for start, end in itertools.pairwise((0, *ends, len(values)))]


# A primitive, so that JAX does not split the scan of the tangents where it partially evaluates the derivative: what
# depends on residuals alone would be computed by a scan of its own in the forward pass, and stored.
_linear_scan = Primitive("linear_scan")
_linear_scan.multiple_results = True


def _apply_linear(*values: Any, scan: _LinearScan, jaxpr: Any) -> list[Any]:
    return scan.apply(*values)


def _differentiate_linear(values: Any, dots: Any, *, scan: _LinearScan, jaxpr: Any) -> tuple[list[Any], list[Any]]:
    return jax.jvp(scan.apply, values, tuple(map(ad.instantiate_zeros, dots)))


def _transpose_linear(cotangents: Any, *values: Any, scan: _LinearScan, jaxpr: Any) -> list[Any]:
    held = sum(scan.counts[:2])
    types = [x.aval if ad.is_undefined_primal(x) else jax.typeof(x) for x in values[held:]]
    shapes = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in types]
    grads = scan.transpose(list(values[:held]), shapes, [ad.instantiate_zeros(dot) for dot in cotangents])
    pairs = zip(values[held:], grads, strict=True)
    return [None] * held + [grad if ad.is_undefined_primal(x) else None for x, grad in pairs]


def _batch_linear(values: Any, axes: Any, *, scan: _LinearScan, jaxpr: Any) -> tuple[list[Any], list[int]]:
    y = jax.vmap(scan.apply, in_axes=tuple(axes))(*values)
    return y, [0] * len(y)


_linear_scan.def_impl(_apply_linear)
_linear_scan.def_abstract_eval(lambda *avals, scan, jaxpr: jaxpr.out_avals)
ad.primitive_jvps[_linear_scan] = _differentiate_linear
ad.primitive_transposes[_linear_scan] = _transpose_linear
batching.primitive_batchers[_linear_scan] = _batch_linear
mlir.register_lowering(_linear_scan, mlir.lower_fun(_apply_linear, multiple_results=True))


def _call_live(
    step: Callable[..., list[Any]], values: Sequence[Any], is_live: list[bool], *live: Any
) -> tuple[list[Any], list[Any]]:
    """The outputs of a step, those that are inexact and the others, each with None in the place of the other."""
    rest = iter(live)
    outputs = step(*[next(rest) if keep else value for value, keep in zip(values, is_live, strict=True)])
    return [y if _is_inexact(y) else None for y in outputs], [None if _is_inexact(y) else y for y in outputs]


def _select(values: Sequence[Any], is_kept: Sequence[bool]) -> list[Any]:
    return [value for value, keep in zip(values, is_kept, strict=True) if keep]


def _is_inexact(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, np.inexact)


def _read(stack: Any, index: Any) -> Any:
    return lax.dynamic_index_in_dim(stack, index, 0, keepdims=False)


def _empty_stack(aval: Any, length: int, first: Any = None) -> Any:
    """A stack that is allocated but not filled; with a first entry, one that is longer by it."""
    if first is None:
        return lax.empty((length, *aval.shape), aval.dtype)
    return lax.dynamic_update_index_in_dim(lax.empty((length + 1, *aval.shape), aval.dtype), first, 0, 0)


def _instantiate(dot: Any, value: Any) -> Any:
    return lax.full_like(value, 0) if isinstance(dot, SymbolicZero) else dot


def _evaluate(jaxpr: Any, consts: list[Any], values: list[Any], store: Callable[[Any, Any], Any]) -> list[Any]:
    """The outputs of a jaxpr, each of whose variables is replaced by what `store` returns for it."""
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update({atom: store(atom, value) for atom, value in zip(jaxpr.invars, values, strict=True)})
    for eqn in jaxpr.eqns:
        inputs = list(dict.fromkeys(atom for atom in eqn.invars if isinstance(atom, Var)))
        outputs = [atom for atom in eqn.outvars if not isinstance(atom, DropVar)]
        single = jaxpr.replace(constvars=[], invars=inputs, outvars=outputs, eqns=[eqn])  # keeps scope and source line
        found = eval_jaxpr(single, [], *[env[atom] for atom in inputs])
        env.update({atom: store(atom, value) for atom, value in zip(outputs, found, strict=True)})
    return [atom.val if isinstance(atom, Literal) else env[atom] for atom in jaxpr.outvars]
