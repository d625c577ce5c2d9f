# SPDX-License-Identifier: Apache-2.0
"""The proxy's nftables table."""
