// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package kuberouterbuild exists for its go.mod: it pins kube-router, and what it is built from by checksums.
package kuberouterbuild

import _ "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router"
