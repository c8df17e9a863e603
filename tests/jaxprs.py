"""The operations of a traced program, for all supported releases of JAX."""

import jax

try:
    from jax.extend.core import jaxprs_in_params
except ImportError:  # before JAX 0.8
    from jax.core import jaxprs_in_params

__all__ = ["jaxprs_in_params", "operations"]


def operations(function, *args):
    """Return (name, operand shapes) of every primitive, including those inside loops and calls."""
    found = []

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            found.append((eqn.primitive.name, tuple(v.aval.shape for v in eqn.invars)))
            for value in jax.tree.leaves(eqn.params, is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")):
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    walk(inner)

    walk(jax.make_jaxpr(function)(*args).jaxpr)
    return found
