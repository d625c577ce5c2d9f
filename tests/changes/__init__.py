# SPDX-License-Identifier: Apache-2.0
"""Changes under load: what the rules allow at every moment, and whether each connection followed them."""
