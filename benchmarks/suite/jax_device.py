"""What all libraries on JAX measure alike; without Optax, whose import would count as part of a start."""

import jax


def wait(result):
    return jax.block_until_ready(result)


def peak_memory():
    stats = jax.local_devices()[0].memory_stats()  # None on a CPU
    return stats["peak_bytes_in_use"] if stats else 0
