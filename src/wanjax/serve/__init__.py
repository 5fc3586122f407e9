# SPDX-License-Identifier: Apache-2.0
"""A model kept loaded and compiled behind HTTP, with a page for a person: `wanjax serve`.

Only the command line imports this package. Its libraries, Starlette and uvicorn, are the extra `serve`.
"""
