"""Custom JVP rules, one for each argument."""

import jax
import numpy as np

from mlax._jax import with_jvps


def test_a_rule_is_traced_only_for_a_nonzero_tangent():
    traced = []

    def rule(name, change):
        def change_of(dot, a, b):
            traced.append(name)
            return change(dot, a, b)

        return change_of

    product = with_jvps(lambda a, b: a * b, rule("a", lambda dot, a, b: dot * b), rule("b", lambda dot, a, b: a * dot))
    np.testing.assert_allclose(jax.grad(product)(2.0, 3.0), 3.0)
    assert traced == ["a"]
    np.testing.assert_allclose(jax.grad(product, (0, 1))(2.0, 3.0), (3.0, 2.0))
    np.testing.assert_allclose(jax.hessian(product, (0, 1))(2.0, 3.0), ((0.0, 1.0), (1.0, 0.0)))
