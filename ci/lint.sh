#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The linters: seconds, no vLLM.
exec "$(dirname -- "$0")/../scripts/test.sh" lint
