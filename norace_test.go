//go:build !race

package dualcheck

const raceDetector = false
