#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# Kernels, quality and the whole engine without a GPU: up to 25 minutes on two cores.
exec "$(dirname -- "$0")/../scripts/test.sh" kernels quality engine
