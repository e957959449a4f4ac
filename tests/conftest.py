"""What all tests run under: strict dtype promotion, eight simulated devices, shapes of `ops` checked."""

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_num_cpu_devices", 8)

with install_import_hook("mlax.ops", "beartype.beartype"):
    import mlax  # noqa: F401
