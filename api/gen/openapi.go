// Package gen holds what buf makes of the contract, and the OpenAPI document of
// its JSON side as bytes.
package gen

import _ "embed"

// OpenAPI is the contract's JSON side as an OpenAPI 2.0 document, in JSON.
//
//go:embed dualcheck.swagger.json
var OpenAPI []byte
