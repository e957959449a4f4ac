"""The residuals of a layer in `layer_scan`: which variables are stored, copied into their stacks, or computed again."""

import dataclasses
import functools
from typing import Any, NamedTuple

from jax import lax
from jax.extend.core import DropVar, Literal, Var

from mlax._jax._layer_form import LAYER_FORM
from mlax._jax._recomputable import RECOMPUTABLE

# of these the operand is stored, and they are computed again
VIEWS = frozenset({"reshape", "squeeze", "broadcast_in_dim", "stop_gradient"})
BEFORE_SUM = VIEWS | {"add", "mul", "convert_element_type"}  # from a product to a residual connection
# what XLA does not fuse with other operations on a slice of a stack
OPAQUE = frozenset({"dot_general", "cond", LAYER_FORM})


@dataclasses.dataclass(frozen=True)
class Residuals:
    """What the tangent of a step needs of its forward pass."""

    jaxpr: Any  # of the forward pass
    atoms: list[Any]  # its variables that are residuals
    carried: int  # how many of its inputs are the carry

    @functools.cached_property
    def sources(self) -> "list[_Source]":
        """What each residual is computed from."""
        return [self.find_source(atom) for atom in self.atoms]

    def find_source(self, atom: Any) -> "_Source":
        return _Source.find(atom, self.producers, self.attached)

    @functools.cached_property
    def origins(self) -> set[Any]:
        """The results of equations that the residuals are views of, before `attach` gives them a derivative."""
        return {self.detached.get(source.atom, source.atom) for source in self.sources if isinstance(source.atom, Var)}

    @functools.cached_property
    def producers(self) -> dict[Any, Any]:
        return {out: eqn for eqn in self.jaxpr.eqns for out in eqn.outvars}

    @functools.cached_property
    def attached(self) -> dict[Any, Any]:
        return _find_attached(self.jaxpr)

    @functools.cached_property
    def detached(self) -> dict[Any, Any]:
        """The inverse of `attached`."""
        return {out: value for value, out in self.attached.items()}

    @functools.cached_property
    def copied(self) -> set[Any]:
        return _find_copied(self.jaxpr)

    @functools.cached_property
    def recomputed(self) -> "dict[Any, _Recomputation]":
        """How to recompute those variables that the residuals are views of but that are not stored.

        A normalized array that several products read is copied into its stack and out of it. To recompute it from what
        is stored anyway moves half as many bytes.
        """
        sources = dict.fromkeys(source.atom for source in self.sources if isinstance(source.atom, Var))
        given = {*self.jaxpr.constvars, *self.jaxpr.invars, *(atom for atom in sources if atom not in self.copied)}
        found = {}
        for atom in filter(self.copied.__contains__, sources):
            eqn = self.producers.get(atom)
            if eqn is not None and eqn.primitive.name == RECOMPUTABLE:
                inputs = [self.find_source(each) for each in eqn.invars[1:]]
                if all(each.atom is None or isinstance(each.atom, Literal) or each.atom in given for each in inputs):
                    found[atom] = _Recomputation(eqn, inputs)
        return found

    @functools.cached_property
    def needed(self) -> list[Any]:
        """The variables that the residuals are computed from."""
        inputs = [each for recomputation in self.recomputed.values() for each in recomputation.inputs]
        atoms = [source.atom for source in (*self.sources, *inputs) if isinstance(source.atom, Var)]
        return [atom for atom in dict.fromkeys(atoms) if atom not in self.recomputed]

    def compute(self, env: dict[Any, Any]) -> list[Any]:
        """The residuals, for values of the variables that are needed."""
        env = {**env, **{atom: each.compute(env) for atom, each in self.recomputed.items()}}
        values = [(source.compute(env), source.is_separate) for source in self.sources]
        separate = iter(lax.optimization_barrier([x for x, is_separate in values if is_separate]))
        return [next(separate) if is_separate else x for x, is_separate in values]

    @functools.cached_property
    def stored(self) -> list[Any]:
        """The variables that are stored in stacks: all that are needed but xs and constants."""
        given = {*self.jaxpr.constvars, *self.jaxpr.invars[self.carried :]}
        return [atom for atom in self.needed if atom not in given]

    @functools.cached_property
    def stored_carry(self) -> dict[int, Any]:
        """The variables of the carry that are stored, by their index in it."""
        carry = enumerate(self.jaxpr.invars[: self.carried])
        return {index: atom for index, atom in carry if atom in self.stored}


class _Source(NamedTuple):
    """A variable that a residual is a view of, and how to compute the residual from it."""

    atom: Any  # None if the residual depends on nothing
    views: list[Any]  # equations of one operand or of none
    is_separate: bool  # behind an `optimization_barrier`, which keeps XLA from merging what takes it with other uses

    @classmethod
    def find(cls, atom: Any, producers: dict[Any, Any], attached: dict[Any, Any]) -> "_Source":
        views: list[Any] = []
        is_separate = False
        while isinstance(atom, Var):
            atom = attached.get(atom, atom)
            if atom not in producers:
                break
            eqn = producers[atom]
            if eqn.primitive.name == "optimization_barrier":
                atom, is_separate = eqn.invars[eqn.outvars.index(atom)], True
            elif eqn.primitive.multiple_results:
                break
            elif not eqn.invars or (eqn.primitive.name in VIEWS and len(eqn.invars) == 1):
                views.insert(0, eqn)
                atom = eqn.invars[0] if eqn.invars else None
            else:
                break
        return cls(atom, views, is_separate)

    def compute(self, env: dict[Any, Any]) -> Any:
        values = [] if self.atom is None else [self.atom.val if isinstance(self.atom, Literal) else env[self.atom]]
        for eqn in self.views:
            values = [eqn.primitive.bind(*values, **eqn.params)]
        return values[0]


class _Recomputation(NamedTuple):
    """How the result of a `recomputable` is recomputed in the backward pass."""

    eqn: Any
    inputs: list[_Source]

    def compute(self, env: dict[Any, Any]) -> Any:
        values = [each.compute(env) for each in self.inputs]
        return self.eqn.params["compute"](*self.eqn.params["tree"].unflatten(values))


def _find_attached(jaxpr: Any) -> dict[Any, Any]:
    """What each `attach` returns for its last arguments: the same values, which have a derivative only there.

    Not those of the jaxpr's own arguments and constants, which other equations use without that derivative.
    """
    attaches = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "attach"]
    pairs = [pair for eqn in attaches for pair in zip(_returned_inputs(eqn), eqn.outvars, strict=True)]
    computed = {out for eqn in jaxpr.eqns for out in eqn.outvars}
    return {
        given: out
        for given, out in pairs
        if isinstance(given, Var) and given in computed and not isinstance(out, DropVar)
    }


def _find_users(jaxpr: Any) -> dict[Any, list[Any]]:
    users: dict[Any, list[Any]] = {}
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if isinstance(atom, Var):
                users.setdefault(atom, []).append(eqn)
    return users


def find_residual_products(jaxpr: Any) -> set[Any]:
    """The outputs of matrix products that are added to an array of their size, as in a residual connection.

    XLA's GPU compiler would pass that array, which it copies first, and the bias to the product, and such a product
    takes no slice of a stack. Added by a fusion, which reads and writes as much, they let it take one.
    """
    users = _find_users(jaxpr)

    def is_added(atom: Any) -> bool:
        found = users.get(atom, [])
        if len(found) != 1 or found[0].primitive.name not in BEFORE_SUM:
            return False
        is_sum = any(other is not atom and other.aval.size == atom.aval.size for other in found[0].invars)
        return is_sum or is_added(found[0].outvars[0])

    return {eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general" and is_added(eqn.outvars[0])}


def _find_copied(jaxpr: Any) -> set[Any]:
    """What is copied into its stack while its users go on, since reading it from there would itself be a copy.

    These are the operands and results of libraries such as cuDNN, which take no slice of a stack, and what several
    operations use that XLA does not fuse with a slice, or one of them and a fusion.
    """
    users, library_calls = _find_users(jaxpr), [eqn for eqn in jaxpr.eqns if _calls_library(eqn)]

    def find_uses(atom: Any) -> list[Any]:
        """The equations that use it, or a view of it."""
        found: list[Any] = []
        for eqn in users.get(atom, []):
            if eqn.primitive.name in ("attach", "optimization_barrier"):
                pairs = zip(_returned_inputs(eqn), eqn.outvars, strict=True)
                found += [use for given, out in pairs if given is atom for use in find_uses(out)]
            elif eqn.primitive.name == RECOMPUTABLE:  # which evaluates to its first argument
                found += find_uses(eqn.outvars[0]) if eqn.invars[0] is atom else []
            else:
                found += find_uses(eqn.outvars[0]) if eqn.primitive.name in VIEWS else [eqn]
        return found

    def is_copied(atom: Any) -> bool:
        uses = find_uses(atom)
        is_opaque = any(eqn.primitive.name in OPAQUE for eqn in uses)
        return any(use is call for use in uses for call in library_calls) or (is_opaque and len(uses) > 1)

    attached = _find_attached(jaxpr)
    results = {attached.get(out, out) for call in library_calls for out in call.outvars}
    return results | {out for eqn in jaxpr.eqns for out in eqn.outvars if is_copied(out)}


def _returned_inputs(eqn: Any) -> list[Any]:
    """The last arguments of a barrier, which returns all of them, or of `attach`, which gives them a derivative."""
    return eqn.invars[len(eqn.invars) - len(eqn.outvars) :]


def _calls_library(eqn: Any) -> bool:
    """Whether an equation computes attention by cuDNN, as far as the platform has it."""
    return eqn.primitive.name == "cond" and any("dot_product_attention" in str(each) for each in eqn.params["branches"])
