# SPDX-License-Identifier: Apache-2.0
"""Prices of programs on TPUs that are absent: compile for the chip, then read memory and time from the result.

    x = jax.ShapeDtypeStruct((8192, 8192), "bfloat16")
    print(Pricer().price(jnp.matmul, x, x, chip="v6e-1").seconds)

prices any function of JAX (`pricer.py`). In parts: trace the function on `chips.abstract_mesh`, compile it with
`compile.compile_program`, and price each of its operations with `costs.price_compiled`. Nothing here is specific
to video models: the names of kernels and scopes are arguments of `Pricer`.

The compiler is libtpu's own (the extra `plan`), which needs no chip. It runs in separate processes, which receive
programs as bytes; its dumps are deleted after they are read. Prices are estimates, not measurements:
docs/performance.md compares the two.
"""
