// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package helmbuild exists for its go.mod: it pins Helm, and what it is built from by checksums.
package helmbuild

import _ "helm.sh/helm/v4/cmd/helm"
