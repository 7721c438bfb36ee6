# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Apply, revert, check and maintain the patch series in `patches/`.

Standard library and the `git` command only: the scripts must run in whatever
environment vLLM is installed in, before anything else is.
"""
