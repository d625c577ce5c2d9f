// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package ciliumbuild exists for its go.mod: it pins Cilium's programs, and what they are built from by checksums.
package ciliumbuild

import (
	_ "github.com/cilium/cilium/daemon"
	_ "github.com/cilium/cilium/operator"
	_ "github.com/cilium/cilium/plugins/cilium-cni"
)
