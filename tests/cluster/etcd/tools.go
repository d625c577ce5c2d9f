// SPDX-License-Identifier: Apache-2.0

//go:build tools

// Package etcdbuild exists for its go.mod: it pins what is built of etcd, and by what checksums.
package etcdbuild

import _ "go.etcd.io/etcd/server/v3"
