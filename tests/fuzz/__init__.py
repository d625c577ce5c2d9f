# SPDX-License-Identifier: Apache-2.0
"""Coverage-guided search for inputs that crash a parser."""
