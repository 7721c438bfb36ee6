#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
# The series against the pinned source, and the tests of its tools: some minutes.
exec "$(dirname -- "$0")/../scripts/test.sh" series tooling
