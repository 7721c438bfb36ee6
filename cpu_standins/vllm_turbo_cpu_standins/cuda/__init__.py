# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""CUDA kernels on a CPU: their sources are compiled as C++, for an emulated GPU."""
