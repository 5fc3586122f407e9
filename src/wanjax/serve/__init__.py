# SPDX-License-Identifier: Apache-2.0
"""The HTTP server and web page of `wanjax serve`. The server keeps a model loaded and compiled.

Only the command line imports this package. The package needs the extra `serve`, which installs Starlette and uvicorn.
"""
