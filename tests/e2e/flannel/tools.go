// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package flannelbuild exists for its go.mod: it pins flanneld, and what it is built from by checksums.
package flannelbuild

import _ "github.com/flannel-io/flannel"
